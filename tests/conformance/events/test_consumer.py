"""One consumer on every broker: each job done once, poison set aside, outages lived through."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.conformance.simulated import SimulatedBroker
from tests.transports.nats.brokers import (
    Broker,
    MemoryBrokerUnderTest,
    NatsServerUnderTest,
    private_server,
    wait_away,
)
from tests.worlds import in_world
from trinamo.runtime.env import RealEnv
from trinamo.runtime.planes import LeasedJob, QueueLimits, WorkQueue
from trinamo.runtime.protocol.queue.consumer import Backoff, JobOutcome
from trinamo.runtime.queues.consumer import ConsumerLimits, open_consumer
from trinamo.transports.servers.binaries import find_nats_server

NATS: Any = "nats"
LIMITS = QueueLimits(visibility_timeout_s=5, attempts_max=8)
PACE = ConsumerLimits(jobs_max=4, backoff=Backoff(min_s=0.05, max_s=0.2))
JOBS = 40


class SeededEnv(RealEnv):
    """Real, but for its dice."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(1)


@pytest.fixture(params=["memory", "simulated", NATS])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    """A broker that may be killed and started again."""
    if request.param == "memory":
        yield MemoryBrokerUnderTest()
    elif request.param == "simulated":
        simulated = SimulatedBroker()
        with in_world(simulated.world):
            yield simulated
    else:
        with private_server(find_nats_server(), "-js", "-sd", str(tmp_path)) as server:
            yield NatsServerUnderTest(server.url, server)


class Effects:
    """What handlers did, per job."""

    def __init__(self) -> None:
        self.attempts: Counter[str] = Counter()
        self.done: Counter[str] = Counter()

    async def handle(self, job: LeasedJob, _: bytes) -> None:
        self.attempts[job.id] += 1
        await trio.sleep(0.02)
        if job.id == "poison" or (job.attempt == 1 and job.id.endswith("3")):
            raise ValueError("no luck")
        self.done[job.id] += 1


async def worked_off(queue: WorkQueue) -> None:
    """Wait until every job is done or dead."""
    with trio.fail_after(120):
        while (await queue.statistics()).depth:
            await trio.sleep(0.05)


async def test_every_job_is_done_once_through_failures_and_a_killed_broker(broker: Broker) -> None:
    effects = Effects()
    env = SeededEnv()
    async with broker.connect() as plane, plane.work_queue("work", limits=LIMITS) as queue:
        await queue.put("poison", b"")
        for number in range(JOBS):
            await queue.put(f"job-{number}", b"")
        async with open_consumer(
            queue, effects.handle, decode=bytes, env=env, limits=PACE
        ) as consumer:
            with trio.fail_after(120):
                while consumer.counts.outcomes[JobOutcome.DONE] < JOBS // 4:
                    await trio.sleep(0.01)
            await broker.stop()
            await wait_away(plane)
            await trio.sleep(0.3)
            await broker.start()
            await worked_off(queue)
        (letter,) = await queue.dead_letters()
        assert (letter.id, letter.attempts) == ("poison", LIMITS.attempts_max)
        assert letter.reason == "ValueError: no luck"
        assert (await queue.statistics()).depth == 0
    outcomes = consumer.counts.outcomes
    assert set(effects.done) == {f"job-{number}" for number in range(JOBS)}
    # A second effect is possible only where an attempt was lost to the outage.
    again = sum(effects.done.values()) - JOBS
    assert again <= outcomes[JobOutcome.LOST] + outcomes[JobOutcome.UNSETTLED]
    assert outcomes[JobOutcome.DONE] <= JOBS
    assert outcomes[JobOutcome.DONE] + outcomes[JobOutcome.UNSETTLED] >= JOBS
    assert consumer.counts.working == 0
