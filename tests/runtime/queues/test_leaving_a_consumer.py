"""A consumer that is drained or cancelled: what it holds is finished or given back."""

from __future__ import annotations

from collections.abc import AsyncIterator

import attrs
import pytest
import trio
from trio.testing import MockClock

from tests.runtime.queues.consuming import LIMITS, PACE, Bench, check_sums, until
from trinamo.runtime.planes import LeasedJob
from trinamo.runtime.protocol.queue.consumer import JobOutcome
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    broker = MemoryBroker()
    plane = MemoryEventPlane(broker)
    async with plane.work_queue("jobs", limits=LIMITS) as queue:
        yield Bench(broker, queue)


async def test_a_drain_lets_what_is_in_hand_finish_and_takes_nothing_more(
    bench: Bench,
    autojump_clock: MockClock,
) -> None:
    for number in range(5):
        await bench.queue.put(f"job-{number}", b"")
    async with bench.consuming(lambda job, _: bench.work_for(job, 20)) as consumer:
        await until(lambda: len(bench.seen) == 2)
    assert consumer.counts.outcomes[JobOutcome.DONE] == 2
    assert bench.cancelled == []
    found = await bench.queue.statistics()
    assert (found.depth, found.leased) == (3, 0)


async def test_a_drain_is_bounded_and_gives_the_rest_back(
    bench: Bench,
    autojump_clock: MockClock,
) -> None:
    await bench.queue.put("job", b"")
    limits = attrs.evolve(PACE, drain_timeout_s=5)
    async with bench.consuming(lambda job, _: bench.work_for(job, 1000), limits) as consumer:
        await until(lambda: bool(bench.seen))
        started_at = trio.current_time()
    assert trio.current_time() - started_at == pytest.approx(5, abs=0.1)
    assert consumer.counts.outcomes[JobOutcome.RETURNED] == 1
    again = await bench.queue.take(wait_s=0)
    assert again is not None
    assert again.attempt == 2


async def test_a_cancelled_consumer_gives_back_what_it_holds(
    bench: Bench,
    autojump_clock: MockClock,
) -> None:
    for number in range(2):
        await bench.queue.put(f"job-{number}", b"")
    with trio.CancelScope() as scope:
        async with bench.consuming(lambda job, _: bench.work_for(job, 1000)):
            await until(lambda: len(bench.seen) == 2)
            scope.cancel()
    assert bench.consumer.counts.outcomes[JobOutcome.RETURNED] == 2
    found = await bench.queue.statistics()
    assert (found.depth, found.leased) == (2, 0)
    check_sums(bench.consumer)


async def test_a_cancelled_consumer_leaves_in_time_though_the_broker_is_away(
    bench: Bench,
    autojump_clock: MockClock,
) -> None:
    await bench.queue.put("job", b"")
    left_at = trio.current_time()
    with trio.CancelScope() as scope:
        async with bench.consuming(lambda job, _: bench.work_for(job, 1000)):
            await until(lambda: bool(bench.seen))
            bench.broker.stop()
            left_at = trio.current_time()
            scope.cancel()
    assert trio.current_time() - left_at <= PACE.return_timeout_s + 0.1
    assert bench.consumer.counts.outcomes[JobOutcome.UNSETTLED] == 1


async def test_work_that_is_finished_is_acked_though_the_consumer_is_cancelled_meanwhile(
    bench: Bench,
    autojump_clock: MockClock,
) -> None:
    with trio.CancelScope() as scope:

        async def handle(job: LeasedJob, _: bytes) -> None:
            bench.begin(job)
            # The next checkpoint, which is in the ack, raises.
            scope.cancel()

        await bench.queue.put("job", b"")
        async with bench.consuming(handle):
            await trio.sleep_forever()
    assert bench.consumer.counts.outcomes[JobOutcome.DONE] == 1
    assert bench.queue.model.counts.acked == 1


async def test_a_handler_that_fails_while_it_is_cancelled_does_not_end_the_consumer_badly(
    bench: Bench,
    autojump_clock: MockClock,
) -> None:
    async def handle(job: LeasedJob, _: bytes) -> None:
        async def clean_up() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("cannot clean up")

        bench.begin(job)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(clean_up)
            nursery.start_soon(trio.sleep_forever)

    await bench.queue.put("job", b"")
    with trio.CancelScope() as scope:
        async with bench.consuming(handle):
            await until(lambda: bool(bench.seen))
            scope.cancel()
    assert scope.cancelled_caught
    assert bench.consumer.counts.outcomes[JobOutcome.RETURNED] == 1
