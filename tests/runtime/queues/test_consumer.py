"""A consumer of a work queue in memory, on a virtual clock: leases, failures, ends, outages."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import msgspec
import pytest
import trio
from trio.testing import MockClock

from tests.runtime.queues.consuming import LIMITS, PACE, Bench, check_sums, until
from trinamo.runtime.errors import EventPlaneError
from trinamo.runtime.planes import LeasedJob, Settlement
from trinamo.runtime.protocol.queue.consumer import JobOutcome
from trinamo.runtime.queues.consumer import Consumer, open_consumer
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    broker = MemoryBroker()
    plane = MemoryEventPlane(broker)
    async with plane.work_queue("jobs", limits=LIMITS) as queue:
        yield Bench(broker, queue)


def ended(consumer: Consumer[Any], outcome: JobOutcome, count: int = 1) -> Callable[[], bool]:
    return lambda: consumer.counts.outcomes[outcome] >= count


async def test_jobs_are_worked_on_and_acked_no_more_than_jobs_max_at_a_time(
    bench: Bench,
    autojump_clock: MockClock,
) -> None:
    working = most = 0

    async def handle(job: LeasedJob, body: bytes) -> None:
        nonlocal working, most
        working += 1
        most = max(most, working)
        await bench.work_for(job, 1)
        working -= 1

    for number in range(10):
        await bench.queue.put(f"job-{number}", b"")
    async with bench.consuming(handle) as consumer:
        await until(ended(consumer, JobOutcome.DONE, 10))
    assert most == 2
    assert (await bench.queue.statistics()).depth == 0
    assert bench.queue.model.counts.acked == 10
    assert {job_id for job_id, _, _ in bench.seen} == {f"job-{number}" for number in range(10)}
    check_sums(consumer)


async def test_a_lease_is_extended_at_a_third_for_as_long_as_the_work_takes(
    bench: Bench,
    autojump_clock: MockClock,
) -> None:
    await bench.queue.put("long", b"")
    async with bench.consuming(lambda job, _: bench.work_for(job, 31)) as consumer:
        await until(ended(consumer, JobOutcome.DONE))
    assert consumer.counts.extensions == 10
    assert bench.queue.model.counts.expired == 0
    assert [attempt for _, attempt, _ in bench.seen] == [1]


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
async def test_a_failed_job_comes_again_after_a_growing_delay_and_then_is_dead(
    bench: Bench,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
    kind: type[BaseException],
) -> None:
    """Also if it exits: it would end each process that takes it in its turn."""

    async def fail(job: LeasedJob, _: bytes) -> None:
        bench.begin(job)
        raise kind("no luck")

    await bench.queue.put("poison", b"")
    with caplog.at_level(logging.INFO, "trinamo.consumer"):
        async with bench.consuming(fail) as consumer:
            await until(ended(consumer, JobOutcome.DEAD))
    begun = [at for _, _, at in bench.seen]
    assert [attempt for _, attempt, _ in bench.seen] == [1, 2, 3]
    assert 0.5 <= begun[1] - begun[0] <= 1.5
    assert 1.0 <= begun[2] - begun[1] <= 3.0
    (letter,) = await bench.queue.dead_letters()
    assert (letter.id, letter.attempts, letter.reason) == ("poison", 3, f"{kind.__name__}: no luck")
    assert consumer.counts.outcomes[JobOutcome.FAILED] == 2
    (record,) = caplog.records
    told = f"poison is a dead letter after 3 attempts: {kind.__name__}: no luck"
    assert told in record.getMessage()
    check_sums(consumer)


class WordlessError(Exception):
    """Whose own words fail."""

    def __str__(self) -> str:
        raise KeyError("page")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no page \ud800"), "ValueError: no page \\ud800"),
        (WordlessError(), "WordlessError, whose text cannot be made"),
        (ExceptionGroup("1 sub-exception", [ValueError("no page")]), "ValueError: no page"),
        (RuntimeError(), "RuntimeError"),
    ],
)
async def test_whatever_a_handler_raises_ends_one_job_and_says_why(
    bench: Bench, autojump_clock: MockClock, error: Exception, reason: str
) -> None:
    async def fail(_: LeasedJob, __: bytes) -> None:
        raise error

    await bench.queue.put("job", b"")
    async with bench.consuming(fail) as consumer:
        await until(ended(consumer, JobOutcome.DEAD))
    (letter,) = await bench.queue.dead_letters()
    assert letter.reason == reason


async def test_a_poison_job_does_not_keep_others_from_being_done(
    bench: Bench,
    autojump_clock: MockClock,
) -> None:
    async def handle(job: LeasedJob, _: bytes) -> None:
        if job.id == "poison":
            raise RuntimeError

    await bench.queue.put("poison", b"")
    for number in range(20):
        await bench.queue.put(f"job-{number}", b"")
    async with bench.consuming(handle) as consumer:
        await until(ended(consumer, JobOutcome.DEAD))
        await until(ended(consumer, JobOutcome.DONE, 20))
    assert [letter.id for letter in await bench.queue.dead_letters()] == ["poison"]


async def test_a_payload_that_does_not_decode_never_reaches_the_handler(
    bench: Bench,
    autojump_clock: MockClock,
) -> None:
    bodies: list[list[int]] = []

    async def handle(_: LeasedJob, body: list[int]) -> None:
        bodies.append(body)

    await bench.queue.put("bad", b"\xff")
    await bench.queue.put("good", msgspec.msgpack.encode([1, 2]))
    decode = msgspec.msgpack.Decoder(list[int]).decode
    async with open_consumer(
        bench.queue, handle, decode=decode, env=bench.env, limits=PACE
    ) as consumer:
        await until(ended(consumer, JobOutcome.DEAD))
    assert bodies == [[1, 2]]
    assert consumer.counts.outcomes[JobOutcome.UNDECODABLE] == 2
    (letter,) = await bench.queue.dead_letters()
    assert (letter.id, letter.payload) == ("bad", b"\xff")
    assert letter.reason.startswith("it does not decode: ")


async def test_work_whose_lease_was_taken_away_is_cancelled_and_changes_nothing(
    bench: Bench,
    autojump_clock: MockClock,
) -> None:
    held: list[LeasedJob] = []

    async def handle(job: LeasedJob, _: bytes) -> None:
        held.append(job)
        await bench.work_for(job, 1000)

    await bench.queue.put("job", b"")
    async with bench.consuming(handle) as consumer:
        await until(lambda: bool(held))
        began_at = trio.current_time()
        # As if the broker had found it expired: another took it, under a token of its own.
        consumer.drain()
        assert await bench.queue.nak(held[0]) is Settlement.APPLIED
        other = await bench.queue.take(wait_s=1)
        assert other is not None
        await until(ended(consumer, JobOutcome.LOST))
        assert bench.cancelled == ["job"]
        assert trio.current_time() - began_at < LIMITS.visibility_timeout_s
        assert await bench.queue.ack(other) is Settlement.APPLIED
    check_sums(consumer)


async def test_a_job_that_comes_with_the_drain_is_given_back_unbegun(
    bench: Bench, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = bench.queue.take

    async def taken_last(*, wait_s: float) -> LeasedJob | None:
        job = await take(wait_s=wait_s)
        if job is not None:
            bench.consumer.drain()
        return job

    monkeypatch.setattr(bench.queue, "take", taken_last)
    await bench.queue.put("job", b"")
    async with bench.consuming(lambda job, _: bench.work_for(job, 1)) as consumer:
        await until(ended(consumer, JobOutcome.RETURNED))
    assert bench.seen == []
    assert await take(wait_s=1) is not None
    check_sums(consumer)


async def test_work_of_whoever_was_stopped_while_the_job_came_is_cancelled_at_once(
    bench: Bench, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to its take lay there for longer than the lease: the job is somebody else's."""
    take = bench.queue.take
    others: list[LeasedJob | None] = []

    async def taken_long_ago(*, wait_s: float) -> LeasedJob | None:
        job = await take(wait_s=wait_s)
        if job is not None and not others:
            await trio.sleep(LIMITS.visibility_timeout_s + 1)
            others.append(await take(wait_s=1))
        return job

    monkeypatch.setattr(bench.queue, "take", taken_long_ago)
    await bench.queue.put("job", b"")
    one = attrs.evolve(PACE, jobs_max=1)
    async with bench.consuming(lambda job, _: bench.work_for(job, 1), one) as consumer:
        await until(ended(consumer, JobOutcome.LOST))
        assert bench.cancelled == ["job"]
        assert others[0] is not None
        assert await bench.queue.ack(others[0]) is Settlement.APPLIED


async def test_work_goes_on_through_a_short_outage_and_is_acked_after_it(
    bench: Bench,
    autojump_clock: MockClock,
) -> None:
    await bench.queue.put("job", b"")
    async with bench.consuming(lambda job, _: bench.work_for(job, 4)) as consumer:
        await until(lambda: bool(bench.seen))
        bench.broker.stop()
        await trio.sleep(7)
        bench.broker.start()
        await until(ended(consumer, JobOutcome.DONE))
    assert [attempt for _, attempt, _ in bench.seen] == [1]


async def test_work_is_cancelled_when_an_outage_outlasts_its_lease_and_done_again_after(
    bench: Bench,
    autojump_clock: MockClock,
) -> None:
    async def handle(job: LeasedJob, _: bytes) -> None:
        await bench.work_for(job, 100 if job.attempt == 1 else 1)

    await bench.queue.put("job", b"")
    async with bench.consuming(handle) as consumer:
        await until(lambda: bool(bench.seen))
        taken_at = trio.current_time()
        bench.broker.stop()
        await until(ended(consumer, JobOutcome.LOST))
        assert trio.current_time() - taken_at <= LIMITS.visibility_timeout_s + 0.1
        await trio.sleep(60)
        bench.broker.start()
        await until(ended(consumer, JobOutcome.DONE))
    assert [attempt for _, attempt, _ in bench.seen] == [1, 2]
    assert bench.queue.model.counts.acked == 1
    assert bench.cancelled == ["job"]


async def test_a_broker_that_refuses_takes_is_asked_again_and_named_once(
    bench: Bench,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take, left = bench.queue.take, 20

    async def refuse(*, wait_s: float) -> LeasedJob | None:
        nonlocal left
        left -= 1
        if left >= 0:
            await trio.lowlevel.checkpoint()
            raise EventPlaneError("no space left")
        return await take(wait_s=wait_s)

    monkeypatch.setattr(bench.queue, "take", refuse)
    await bench.queue.put("job", b"")
    async with bench.consuming(lambda job, _: bench.work_for(job, 1)) as consumer:
        await until(ended(consumer, JobOutcome.DONE))
    assert consumer.counts.broker_errors == 20
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "gives no jobs: no space left" in record.getMessage()


async def test_every_end_is_noted_and_told(
    bench: Bench,
    autojump_clock: MockClock,
) -> None:
    told: list[JobOutcome] = []

    async def fail_once(job: LeasedJob, _: bytes) -> None:
        if job.attempt == 1:
            raise ValueError

    await bench.queue.put("job", b"")
    async with open_consumer(
        bench.queue,
        fail_once,
        decode=bytes,
        env=bench.env,
        limits=PACE,
        on_outcome=told.append,
    ) as consumer:
        await until(ended(consumer, JobOutcome.DONE))
    assert told == [JobOutcome.FAILED, JobOutcome.DONE]
    assert bench.env.notes == [
        ("queue.outcome", {"job": "job", "attempt": 1, "outcome": "failed"}),
        ("queue.outcome", {"job": "job", "attempt": 2, "outcome": "done"}),
    ]


async def test_two_consumers_through_outages_do_every_job_once(
    bench: Bench,
    autojump_clock: MockClock,
) -> None:
    """Handlers that are slow, fail, and lose their leases: one applied ack per job all the same."""
    dice = random.Random(7)
    for number in range(60):
        await bench.queue.put(f"job-{number}", b"")

    async def handle(job: LeasedJob, _: bytes) -> None:
        bench.begin(job)
        await trio.sleep(dice.choice([0.1, 1.0, 8.0]))
        if job.attempt == 1 and dice.random() < 0.3:
            raise ValueError

    model = bench.queue.model
    model.limits = attrs.evolve(LIMITS, attempts_max=100)
    async with bench.consuming(handle) as one, bench.consuming(handle) as other:
        while model.counts.acked < 60:
            await trio.sleep(dice.uniform(0, 10))
            bench.broker.stop()
            await trio.sleep(dice.uniform(0, 15))
            bench.broker.start()
    done = sum(each.counts.outcomes[JobOutcome.DONE] for each in (one, other))
    assert (done, model.counts.acked, model.counts.died) == (60, 60, 0)
    assert sum(each.counts.outcomes[JobOutcome.LOST] for each in (one, other)) > 0
    check_sums(one)
    check_sums(other)
