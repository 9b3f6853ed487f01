"""What a process counts of its work queues, what it shows of them, and while the broker is away."""

from __future__ import annotations

import logging

import pytest
import trio
from trio.testing import MockClock

from tests.runtime.one_process import OneProcess, config
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import UnavailableError
from trinamo.runtime.metrics.metrics import Metrics
from trinamo.runtime.planes import LeasedJob, QueueLimits
from trinamo.runtime.process.opening import open_runtime
from trinamo.runtime.protocol.queue.consumer import Backoff
from trinamo.runtime.queues.consumer import ConsumerLimits
from trinamo.runtime.queues.queues import SHOWN_MAX, Queues
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane

LIMITS = QueueLimits(visibility_timeout_s=5, attempts_max=2)
INTERVAL_S = 5.0


class Process:
    """The queues of one process, and what its `/metrics` shows of them."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        env = RealEnv()
        self.metrics = Metrics(env)
        self.queues = Queues(
            MemoryEventPlane(self.broker), env, read_interval_s=INTERVAL_S, metrics=self.metrics
        )

    def jobs(self, state: str) -> float:
        return self.metrics.value("queue_jobs", queue="q", state=state)

    def operations(self, operation: str, result: str) -> float:
        return self.metrics.value(
            "queue_operations_total", queue="q", operation=operation, result=result
        )

    def outcomes(self, outcome: str) -> float:
        return self.metrics.value("queue_outcomes_total", queue="q", outcome=outcome)

    @property
    def text(self) -> str:
        return self.metrics.render().decode()


async def test_depth_and_age_are_read_now_and_then(autojump_clock: MockClock) -> None:
    process = Process()
    async with process.queues.open("q", limits=LIMITS) as queue:
        for number in range(3):
            await queue.put(f"job-{number}", b"")
        job = await queue.take(wait_s=0)
        assert job is not None
        await trio.sleep(2)
        await queue.nak(job)
        job = await queue.take(wait_s=0)
        assert job is not None
        await queue.nak(job)
        assert await queue.take(wait_s=0) is not None
        await trio.sleep(1.3 * INTERVAL_S)
        found = await queue.statistics()
        assert process.jobs("dead") == 1
        assert process.jobs("ready") + process.jobs("leased") == found.depth
        assert 2 < process.metrics.value("queue_oldest_age_seconds", queue="q") < 10
        assert process.metrics.value("queue_statistics_age_seconds", queue="q") < INTERVAL_S
    assert "trinamo_queue_jobs{" not in process.text


async def test_what_this_process_does_is_counted_by_how_it_was_answered(
    autojump_clock: MockClock,
) -> None:
    process = Process()
    async with process.queues.open("q", limits=LIMITS) as queue:
        await queue.put("job", b"")
        await queue.put("job", b"")
        job = await queue.take(wait_s=0)
        assert job is not None
        await queue.extend(job)
        await queue.nak(job)
        await queue.ack(job)
        job = await queue.take(wait_s=0)
        assert job is not None
        await queue.nak(job)
        assert await queue.take(wait_s=0) is None
        process.broker.stop()
        with pytest.raises(Exception, match="away"):
            await queue.put("other", b"", timeout_s=1)
    counted = {
        ("put", "added"): 1,
        ("put", "duplicate"): 1,
        ("put", "failed"): 1,
        ("take", "leased"): 2,
        ("extend", "applied"): 1,
        ("nak", "applied"): 1,
        ("nak", "dead"): 1,
        ("ack", "stale"): 1,
        ("ack", "applied"): 0,
    }
    assert {key: process.operations(*key) for key in counted} == counted


async def test_the_last_numbers_stay_while_the_broker_is_away(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process()
    async with process.queues.open("q", limits=LIMITS) as queue:
        await queue.put("job", b"")
        await trio.sleep(1.3 * INTERVAL_S)
        process.broker.stop()
        with caplog.at_level(logging.WARNING, "trinamo.queues"):
            await trio.sleep(100)
        assert process.jobs("ready") == 1
        assert process.metrics.value("queue_statistics_age_seconds", queue="q") > 90
        assert len(caplog.records) == 1
        process.broker.start()
        await queue.put("another", b"")
        await trio.sleep(1.3 * INTERVAL_S)
        assert process.jobs("ready") == 2


async def test_what_consumers_make_of_their_jobs_is_shown(autojump_clock: MockClock) -> None:
    process = Process()
    both_began = trio.Event()

    async def handle(job: LeasedJob, body: bytes) -> None:
        if body == b"bad":
            raise ValueError(body)
        both_began.set()
        await trio.sleep(3)

    async with process.queues.consume(
        "q",
        handler=handle,
        decode=bytes,
        queue_limits=LIMITS,
        limits=ConsumerLimits(backoff=Backoff(min_s=0)),
    ):
        async with process.queues.open("q") as queue:
            await queue.put("good", b"good")
            await queue.put("bad", b"bad")
        await both_began.wait()
        assert process.metrics.value("queue_working", queue="q") >= 1
        await trio.sleep(5)
    assert (process.outcomes("done"), process.outcomes("failed")) == (1, 1)
    assert (process.outcomes("dead"), process.outcomes("lost")) == (1, 0)
    assert process.metrics.value("queue_working", queue="q") == 0


async def test_names_beyond_a_bound_make_no_series() -> None:
    process = Process()
    for number in range(SHOWN_MAX + 5):
        async with process.queues.open(f"q{number}", limits=LIMITS) as queue:
            await queue.put("job", b"")
    assert len(process.queues.tallies) == SHOWN_MAX
    assert f'queue="q{SHOWN_MAX}"' not in process.text


async def test_a_process_without_queues_shows_none_and_a_runtime_has_them() -> None:
    assert "trinamo_queue" not in Process().text
    async with open_runtime(config(), RealEnv(), OneProcess()) as runtime:
        with pytest.raises(UnavailableError, match="there is no queue nobody"):
            async with runtime.queues.open("nobody"):
                pass
        async with runtime.queues.open("prefill", limits=LIMITS) as queue:
            await queue.put("job", b"")
        assert (
            runtime.metrics.value(
                "queue_operations_total", queue="prefill", operation="put", result="added"
            )
            == 1
        )
