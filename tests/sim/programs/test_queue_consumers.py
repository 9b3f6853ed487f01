"""Real consumers of a simulated queue: nothing done twice under faults."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from trinamo.runtime.planes import QueueLimits, Settlement, WorkQueue
from trinamo.sim import ReplayChoices, SeedChoices
from trinamo.sim.core.world import World
from trinamo.sim.env import SimEnv
from trinamo.sim.explore import Scenario, run, swarm
from trinamo.sim.net.network import Network
from trinamo.sim.programs import queue_consumers
from trinamo.sim.services import SimulatedNats
from trinamo.transports.nats import open_nats
from trinamo.transports.nats.queue.fetching import Fetcher

CONSUMERS = Scenario("trinamo.sim.programs.queue_consumers")


@pytest.mark.check
def test_a_swarm_finds_nothing() -> None:
    assert swarm(CONSUMERS, range(32)).failures == {}


def test_a_run_is_replayed_step_by_step() -> None:
    first = queue_consumers.run(SeedChoices(3))
    again = queue_consumers.run(ReplayChoices(first.choices.values, 3))
    assert again.trace.digest == first.trace.digest
    assert run(CONSUMERS, 3).finding is None


LEASE_S = 2.0


def stopped_as_a_job_comes(after_s: float) -> dict[str, Settlement]:
    """What became of the leases on one job: who waits for it is stopped as it comes, for as long as a lease."""
    world = World(
        SeedChoices(1), policy="batch", steps_max=100_000, virtual_s_max=60, ambient="raise"
    )
    Network(world, latency_s=0.01)
    nats = SimulatedNats(world)
    settled: dict[str, Settlement] = {}

    @asynccontextmanager
    async def jobs(host: str) -> AsyncIterator[WorkQueue]:
        limits = QueueLimits(visibility_timeout_s=LEASE_S)
        async with (
            open_nats(nats.url, env=SimEnv(world, host)) as plane,
            plane.work_queue("jobs", limits=limits) as queue,
        ):
            yield queue

    async def put() -> None:
        async with jobs("producer") as queue:
            await queue.put("one", b"")

    async def take(host: str) -> None:
        async with jobs(host) as queue:
            job = await queue.take(wait_s=10)
            if job is not None:
                await trio.sleep(LEASE_S / 4)
                settled[host] = await queue.ack(job)

    async def main() -> None:
        nats.boot()
        world.boot("stopped", take, "stopped")
        await trio.sleep(after_s)
        world.pause("stopped")
        await world.boot("producer", put).ended.wait()
        await trio.sleep(LEASE_S)
        world.resume("stopped")
        world.boot("other", take, "other")
        await trio.sleep(20)

    world.run(main)
    return settled


@pytest.mark.check
@pytest.mark.parametrize("counts", [False, True])
def test_who_was_stopped_as_a_job_came_takes_no_lease_that_is_over(
    monkeypatch: pytest.MonkeyPatch, *, counts: bool
) -> None:
    """With `counts` it is taken for one that was handed out just now: then one of two loses its lease at once."""
    if counts:
        hand_on: Callable[..., None] = Fetcher._hand_on
        monkeypatch.setattr(
            Fetcher, "_hand_on", lambda *call: hand_on(*call[:2], trio.current_time())
        )
    plays = [stopped_as_a_job_comes(0.5 + part / 20) for part in range(20)]
    is_stale = [Settlement.STALE in settled.values() for settled in plays]
    assert all(Settlement.APPLIED in settled.values() for settled in plays)
    assert any(is_stale) if counts else not any(is_stale)
