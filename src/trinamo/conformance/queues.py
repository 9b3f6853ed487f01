"""What every work queue must do, whatever broker keeps it."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator
from typing import Final

import pytest
import trio
import trio.testing

from trinamo.runtime.errors import OverloadedError, RequestError, UnavailableError
from trinamo.runtime.planes import (
    DeadLetter,
    EventPlane,
    JobOrigin,
    LeasedJob,
    PutResult,
    QueueLimits,
    Settlement,
    WorkQueue,
)

from .control import async_fixture
from .events import OpenEvents

LIMITS: Final = QueueLimits(visibility_timeout_s=60, attempts_max=3)
SHORT: Final = QueueLimits(visibility_timeout_s=3, attempts_max=2)
_numbers: Final = itertools.count()


def fresh_name() -> str:
    """A name that no other test's queue has, on whatever server."""
    return f"q{os.getpid()}-{next(_numbers)}"


async def taken(queue: WorkQueue) -> LeasedJob:
    """The next job; fails if none comes."""
    job = await queue.take(wait_s=120)
    assert job is not None
    return job


async def dead_letter_of(queue: WorkQueue, job_id: str) -> DeadLetter:
    """The dead letter that this job becomes as its last lease expires; no job may come before."""
    with trio.fail_after(120):
        while (letter := await queue.dead_letter(job_id)) is None:
            assert await queue.take(wait_s=0.2) is None
    return letter


async def bury(queue: WorkQueue, job_id: str) -> None:
    """Put a job and let it fail until it is a dead letter."""
    await queue.put(job_id, job_id.encode())
    outcome = Settlement.APPLIED
    while outcome is not Settlement.DEAD:
        outcome = await queue.nak(await taken(queue), reason=f"no luck with {job_id}: é\r\n")


async def cancel_soon(scope: trio.CancelScope, turns: int) -> None:
    """Cancel after so many turns of the scheduler."""
    for _ in range(turns):
        await trio.lowlevel.checkpoint()
    scope.cancel()


@pytest.mark.trio
class WorkQueueConformance:
    """What every `WorkQueue` promises; `open_plane` opens one more process's `EventPlane`."""

    @pytest.fixture
    def name(self) -> str:
        """One that no other test's queue has."""
        return fresh_name()

    @async_fixture
    async def plane(self, open_plane: OpenEvents) -> AsyncIterator[EventPlane]:
        """One process's plane."""
        with trio.fail_after(120):
            async with open_plane() as plane:
                yield plane

    @async_fixture
    async def queue(self, plane: EventPlane, name: str) -> AsyncIterator[WorkQueue]:
        """Leases of 60 s, three attempts."""
        async with plane.work_queue(name, limits=LIMITS) as queue:
            yield queue

    @async_fixture
    async def short_queue(self, plane: EventPlane, name: str) -> AsyncIterator[WorkQueue]:
        """Leases of 3 s, two attempts."""
        async with plane.work_queue(name, limits=SHORT) as queue:
            yield queue

    async def test_jobs_come_out_with_their_payload_in_the_order_they_went_in(
        self,
        queue: WorkQueue,
    ) -> None:
        for number in range(5):
            assert await queue.put(f"job-{number}", bytes([number])) is PutResult.ADDED
        jobs = [await taken(queue) for _ in range(5)]
        assert [(job.id, job.payload, job.attempt) for job in jobs] == [
            (f"job-{number}", bytes([number]), 1) for number in range(5)
        ]
        assert len({job.token for job in jobs}) == 5
        assert await queue.take(wait_s=0) is None

    async def test_a_job_says_for_whom_it_was_put_each_time_it_is_taken_and_after_a_requeue(
        self,
        queue: WorkQueue,
    ) -> None:
        origin = JobOrigin(
            traceparent=f"00-{7:032x}-{9:016x}-01", request_id="mine-0123456789abcdef"
        )
        await queue.put("of-nobody", b"")
        nobody_s = await taken(queue)
        assert nobody_s.origin == JobOrigin()
        await queue.ack(nobody_s)
        await queue.put("job", b"payload", origin=origin)
        told: list[JobOrigin] = []
        for _ in range(LIMITS.attempts_max):
            job = await taken(queue)
            told.append(job.origin)
            await queue.nak(job, reason="no luck")
        assert await queue.requeue("job")
        told.append((await taken(queue)).origin)
        assert told == [origin] * (LIMITS.attempts_max + 1)

    async def test_an_origin_that_makes_no_sense_is_as_if_it_were_not_said(
        self, queue: WorkQueue
    ) -> None:
        origin = JobOrigin(traceparent="00-nonsense\r\n", request_id="two words\r\nX: y")
        await queue.put("job", b"", origin=origin)
        assert (await taken(queue)).origin == JobOrigin()

    async def test_an_acked_job_is_gone(self, queue: WorkQueue) -> None:
        await queue.put("job", b"")
        assert await queue.ack(await taken(queue)) is Settlement.APPLIED
        assert (await queue.statistics()).depth == 0
        assert await queue.take(wait_s=0) is None

    async def test_an_id_in_the_queue_or_put_a_moment_ago_is_a_duplicate(
        self, queue: WorkQueue
    ) -> None:
        assert await queue.put("job", b"1") is PutResult.ADDED
        assert await queue.put("job", b"2") is PutResult.DUPLICATE
        job = await taken(queue)
        assert job.payload == b"1"
        assert await queue.put("job", b"3") is PutResult.DUPLICATE
        await queue.ack(job)
        assert await queue.put("job", b"4") is PutResult.DUPLICATE
        assert (await queue.statistics()).depth == 0

    async def test_an_id_is_forgotten_after_the_window_but_not_while_it_is_queued(
        self, plane: EventPlane, name: str
    ) -> None:
        limits = QueueLimits(duplicate_window_s=0.3, visibility_timeout_s=60)
        async with plane.work_queue(name, limits=limits) as queue:
            await queue.put("job", b"1")
            await trio.sleep(0.6)
            assert await queue.put("job", b"2") is PutResult.DUPLICATE
            await queue.ack(await taken(queue))
            assert await queue.put("job", b"3") is PutResult.ADDED
            job = await taken(queue)
            assert (job.payload, job.attempt) == (b"3", 1)
            assert await queue.ack(job) is Settlement.APPLIED

    async def test_a_waiting_taker_gets_a_job_that_is_put_meanwhile(self, queue: WorkQueue) -> None:
        jobs: list[LeasedJob] = []

        async def take() -> None:
            jobs.append(await taken(queue))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(take)
            await trio.testing.wait_all_tasks_blocked(0.01)
            for number in range(3):
                await queue.put(f"job-{number}", b"")
        assert {job.id for job in jobs} == {"job-0", "job-1", "job-2"}

    async def test_each_job_goes_to_one_of_several_processes(
        self, open_plane: OpenEvents, queue: WorkQueue
    ) -> None:
        found: list[str] = []

        async def work(queue: WorkQueue) -> None:
            while len(found) < 40:
                if (job := await queue.take(wait_s=0.2)) is not None:
                    assert await queue.ack(job) is Settlement.APPLIED
                    found.append(job.id)

        for number in range(40):
            await queue.put(f"job-{number}", b"")
        async with (
            open_plane() as elsewhere,
            elsewhere.work_queue(queue.name) as other,
            trio.open_nursery() as nursery,
        ):
            for each in (queue, queue, other, other):
                nursery.start_soon(work, each)
        assert sorted(found) == sorted(f"job-{number}" for number in range(40))

    async def test_an_expired_job_is_taken_again_and_the_late_ack_is_stale(
        self,
        short_queue: WorkQueue,
    ) -> None:
        await short_queue.put("job", b"")
        first = await taken(short_queue)
        second = await taken(short_queue)
        assert (second.id, second.attempt) == ("job", 2)
        assert second.token != first.token
        assert await short_queue.ack(first) is Settlement.STALE
        assert await short_queue.extend(first) is Settlement.STALE
        assert await short_queue.nak(first) is Settlement.STALE
        assert (await short_queue.statistics()).depth == 1
        assert await short_queue.ack(second) is Settlement.APPLIED
        assert (await short_queue.statistics()).depth == 0

    async def test_the_fence_holds_between_processes(
        self, open_plane: OpenEvents, short_queue: WorkQueue
    ) -> None:
        async with open_plane() as elsewhere, elsewhere.work_queue(short_queue.name) as other:
            await short_queue.put("job", b"")
            first = await taken(short_queue)
            second = await taken(other)
            assert await short_queue.ack(first) is Settlement.STALE
            assert await other.ack(second) is Settlement.APPLIED

    async def test_a_settled_lease_is_stale(self, queue: WorkQueue) -> None:
        await queue.put("job", b"")
        job = await taken(queue)
        assert await queue.ack(job) is Settlement.APPLIED
        for settle in (queue.ack, queue.nak, queue.extend):
            assert await settle(job) is Settlement.STALE

    async def test_a_lease_that_is_extended_does_not_expire(
        self, plane: EventPlane, name: str
    ) -> None:
        limits = QueueLimits(visibility_timeout_s=5, attempts_max=2)
        async with plane.work_queue(name, limits=limits) as queue:
            await queue.put("job", b"")
            job = await taken(queue)
            for _ in range(4):
                await trio.sleep(1.5)
                assert await queue.extend(job) is Settlement.APPLIED
            assert await queue.take(wait_s=0) is None
            assert await queue.ack(job) is Settlement.APPLIED

    async def test_a_naked_job_comes_again_at_once(self, queue: WorkQueue) -> None:
        await queue.put("job", b"")
        assert await queue.nak(await taken(queue)) is Settlement.APPLIED
        assert (await taken(queue)).attempt == 2

    async def test_a_naked_job_waits_for_its_delay(self, queue: WorkQueue) -> None:
        await queue.put("job", b"")
        await queue.nak(await taken(queue), delay_s=4)
        assert await queue.take(wait_s=0.1) is None
        assert (await taken(queue)).attempt == 2

    async def test_a_job_whose_attempts_are_used_up_is_a_dead_letter(
        self, queue: WorkQueue
    ) -> None:
        await bury(queue, "poison")
        assert await queue.take(wait_s=0) is None
        (letter,) = await queue.dead_letters()
        assert (letter.id, letter.payload, letter.attempts) == ("poison", b"poison", 3)
        assert letter.reason == "no luck with poison: é\r\n"
        assert await queue.dead_letter("poison") is not None
        assert await queue.dead_letter("other") is None
        statistics = await queue.statistics()
        assert (statistics.depth, statistics.dead) == (0, 1)

    async def test_a_job_whose_takers_all_vanish_is_a_dead_letter(
        self, short_queue: WorkQueue
    ) -> None:
        await short_queue.put("crash", b"")
        assert (await taken(short_queue)).attempt == 1
        assert (await taken(short_queue)).attempt == 2
        letter = await dead_letter_of(short_queue, "crash")
        assert (letter.attempts, letter.reason) == (2, "its last lease expired")
        assert [each.id for each in await short_queue.dead_letters()] == ["crash"]

    async def test_a_dead_letter_that_is_requeued_has_all_its_attempts(
        self, queue: WorkQueue
    ) -> None:
        await bury(queue, "job")
        assert await queue.requeue("job")
        assert not await queue.requeue("job")
        assert await queue.dead_letters() == []
        job = await taken(queue)
        assert (job.id, job.payload, job.attempt) == ("job", b"job", 1)
        assert await queue.ack(job) is Settlement.APPLIED

    async def test_dead_letters_are_listed_oldest_first_and_purged(self, queue: WorkQueue) -> None:
        for job_id in ("a", "b", "c"):
            await bury(queue, job_id)
        assert [letter.id for letter in await queue.dead_letters()] == ["a", "b", "c"]
        assert [letter.id for letter in await queue.dead_letters(count_max=2)] == ["a", "b"]
        assert await queue.purge_dead("b") == 1
        assert await queue.purge_dead("b") == 0
        assert await queue.purge_dead() == 2
        assert await queue.dead_letters() == []

    async def test_depth_leases_and_age_are_told(self, queue: WorkQueue) -> None:
        empty = await queue.statistics()
        assert (empty.depth, empty.leased, empty.dead, empty.oldest_age_s) == (0, 0, 0, 0)
        for number in range(3):
            await queue.put(f"job-{number}", b"")
        await taken(queue)
        found = await queue.statistics()
        assert (found.depth, found.leased, found.ready) == (3, 1, 2)
        assert 0 <= found.oldest_age_s < 60

    async def test_a_full_queue_refuses_jobs_but_knows_its_duplicates(
        self, plane: EventPlane, name: str
    ) -> None:
        async with plane.work_queue(name, limits=QueueLimits(depth_max=2)) as queue:
            await queue.put("a", b"")
            await queue.put("b", b"")
            with pytest.raises(OverloadedError) as caught:
                await queue.put("c", b"")
            assert (caught.value.bound, caught.value.value) == ("depth_max", 2)
            assert await queue.put("a", b"") is PutResult.DUPLICATE
            await queue.ack(await taken(queue))
            assert await queue.put("c", b"") is PutResult.ADDED

    @pytest.mark.parametrize("job_id", ["", "a.b", "a b", "*", "x" * 129, "-a", "é"])
    async def test_a_bad_id_is_refused(self, queue: WorkQueue, job_id: str) -> None:
        with pytest.raises(RequestError):
            await queue.put(job_id, b"")

    async def test_bad_names_sizes_and_delays_are_refused(
        self, plane: EventPlane, queue: WorkQueue
    ) -> None:
        with pytest.raises(RequestError):
            async with plane.work_queue("a.b", limits=LIMITS):
                pass
        with pytest.raises(RequestError):
            await queue.put("big", b"x" * (plane.message_bytes_max + 1))
        await queue.put("job", b"")
        job = await taken(queue)
        with pytest.raises(RequestError):
            await queue.nak(job, delay_s=-1)

    async def test_a_queue_is_found_by_name_and_keeps_its_limits(
        self, plane: EventPlane, queue: WorkQueue
    ) -> None:
        assert queue.name in await plane.work_queue_names()
        async with plane.work_queue(queue.name) as again:
            assert again.limits == LIMITS
        with pytest.raises(UnavailableError):
            async with plane.work_queue("nobody-made-this"):
                pass

    async def test_limits_named_anew_are_in_force(
        self, plane: EventPlane, queue: WorkQueue
    ) -> None:
        await queue.put("job", b"")
        limits = QueueLimits(visibility_timeout_s=20, attempts_max=1, depth_max=7)
        async with plane.work_queue(queue.name, limits=limits) as changed:
            assert await changed.nak(await taken(changed)) is Settlement.DEAD
        async with plane.work_queue(queue.name) as again:
            assert again.limits == limits

    async def test_a_cancelled_take_loses_no_job(self, queue: WorkQueue) -> None:
        for number in range(10):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(queue.put, f"job-{number}", b"")
                    nursery.start_soon(cancel_soon, scope, number)
                    await queue.take(wait_s=0)
        # What was taken and not returned is leased to nobody, or expires; nothing is gone.
        statistics = await queue.statistics()
        assert statistics.dead == 0
        assert statistics.depth <= 10
