"""What every work queue promises, in memory, on the simulated broker, and on real JetStream."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest
import trio
import trio.testing

from tests.conformance.events.queues import LIMITS, _numbers, taken
from tests.conformance.events.receiving import BROKERS, DEBIAN_SERVER
from tests.conformance.simulated import SimulatedBroker
from tests.transports.nats.brokers import (
    Broker,
    MemoryBrokerUnderTest,
    NatsServerUnderTest,
    private_server,
)
from tests.worlds import in_world
from trinamo.runtime.planes import (
    EventPlane,
    JobOrigin,
    LeasedJob,
    PutResult,
    QueueLimits,
    Settlement,
    WorkQueue,
)

SHORT = QueueLimits(visibility_timeout_s=0.4, attempts_max=2)


@pytest.fixture(scope="module")
def debian_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with private_server(DEBIAN_SERVER, "-js", "-sd", str(tmp_path_factory.mktemp("js"))) as server:
        yield server.url


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    if request.param == "memory":
        yield MemoryBrokerUnderTest()
    elif request.param == "simulated":
        simulated = SimulatedBroker()
        with in_world(simulated.world):
            yield simulated
    elif request.param == "nats":
        yield NatsServerUnderTest(request.getfixturevalue("nats_server").url)
    else:
        yield NatsServerUnderTest(request.getfixturevalue("debian_url"))


@pytest.fixture
def name() -> str:
    return f"q{os.getpid()}-{next(_numbers)}"


@pytest.fixture
async def plane(broker: Broker) -> AsyncIterator[EventPlane]:
    with trio.fail_after(60):
        async with broker.connect() as plane:
            yield plane


@pytest.fixture
async def queue(plane: EventPlane, name: str) -> AsyncIterator[WorkQueue]:
    async with plane.work_queue(name, limits=LIMITS) as queue:
        yield queue


@pytest.fixture
async def short_queue(plane: EventPlane, name: str) -> AsyncIterator[WorkQueue]:
    """Leases of 0.4 s, two attempts."""
    async with plane.work_queue(name, limits=SHORT) as queue:
        yield queue


async def bury(queue: WorkQueue, job_id: str) -> None:
    await queue.put(job_id, job_id.encode())
    outcome = Settlement.APPLIED
    while outcome is not Settlement.DEAD:
        outcome = await queue.nak(await taken(queue), reason=f"no luck with {job_id}: é\r\n")


async def test_jobs_come_out_with_their_payload_in_the_order_they_went_in(
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
    queue: WorkQueue,
) -> None:
    origin = JobOrigin(traceparent=f"00-{7:032x}-{9:016x}-01", request_id="mine-0123456789abcdef")
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


async def test_an_origin_that_makes_no_sense_is_as_if_it_were_not_said(queue: WorkQueue) -> None:
    origin = JobOrigin(traceparent="00-nonsense\r\n", request_id="two words\r\nX: y")
    await queue.put("job", b"", origin=origin)
    assert (await taken(queue)).origin == JobOrigin()


async def test_an_acked_job_is_gone(queue: WorkQueue) -> None:
    await queue.put("job", b"")
    assert await queue.ack(await taken(queue)) is Settlement.APPLIED
    assert (await queue.statistics()).depth == 0
    assert await queue.take(wait_s=0) is None


async def test_an_id_in_the_queue_or_put_a_moment_ago_is_a_duplicate(queue: WorkQueue) -> None:
    assert await queue.put("job", b"1") is PutResult.ADDED
    assert await queue.put("job", b"2") is PutResult.DUPLICATE
    job = await taken(queue)
    assert job.payload == b"1"
    assert await queue.put("job", b"3") is PutResult.DUPLICATE
    await queue.ack(job)
    assert await queue.put("job", b"4") is PutResult.DUPLICATE
    assert (await queue.statistics()).depth == 0


@pytest.mark.slow
async def test_an_id_is_forgotten_after_the_window_but_not_while_it_is_queued(
    plane: EventPlane, name: str
) -> None:
    limits = QueueLimits(duplicate_window_s=0.3, visibility_timeout_s=10)
    async with plane.work_queue(name, limits=limits) as queue:
        await queue.put("job", b"1")
        await trio.sleep(0.6)
        assert await queue.put("job", b"2") is PutResult.DUPLICATE
        await queue.ack(await taken(queue))
        assert await queue.put("job", b"3") is PutResult.ADDED
        job = await taken(queue)
        assert (job.payload, job.attempt) == (b"3", 1)
        assert await queue.ack(job) is Settlement.APPLIED


async def test_a_waiting_taker_gets_a_job_that_is_put_meanwhile(queue: WorkQueue) -> None:
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


async def test_each_job_goes_to_one_of_several_processes(broker: Broker, queue: WorkQueue) -> None:
    found: list[str] = []

    async def work(queue: WorkQueue) -> None:
        while (job := await queue.take(wait_s=0.2)) is not None:
            assert await queue.ack(job) is Settlement.APPLIED
            found.append(job.id)

    for number in range(40):
        await queue.put(f"job-{number}", b"")
    async with (
        broker.connect() as elsewhere,
        elsewhere.work_queue(queue.name) as other,
        trio.open_nursery() as nursery,
    ):
        for each in (queue, queue, other, other):
            nursery.start_soon(work, each)
    assert sorted(found) == sorted(f"job-{number}" for number in range(40))


@pytest.mark.slow
async def test_an_expired_job_is_taken_again_and_the_late_ack_is_stale(
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


@pytest.mark.slow
async def test_the_fence_holds_between_processes(broker: Broker, short_queue: WorkQueue) -> None:
    async with broker.connect() as elsewhere, elsewhere.work_queue(short_queue.name) as other:
        await short_queue.put("job", b"")
        first = await taken(short_queue)
        second = await taken(other)
        assert await short_queue.ack(first) is Settlement.STALE
        assert await other.ack(second) is Settlement.APPLIED


async def test_a_settled_lease_is_stale(queue: WorkQueue) -> None:
    await queue.put("job", b"")
    job = await taken(queue)
    assert await queue.ack(job) is Settlement.APPLIED
    for settle in (queue.ack, queue.nak, queue.extend):
        assert await settle(job) is Settlement.STALE


@pytest.mark.slow
async def test_a_lease_that_is_extended_does_not_expire(short_queue: WorkQueue) -> None:
    await short_queue.put("job", b"")
    job = await taken(short_queue)
    for _ in range(6):
        await trio.sleep(0.15)
        assert await short_queue.extend(job) is Settlement.APPLIED
    assert await short_queue.take(wait_s=0) is None
    assert await short_queue.ack(job) is Settlement.APPLIED


async def test_a_naked_job_comes_again_at_once(queue: WorkQueue) -> None:
    await queue.put("job", b"")
    assert await queue.nak(await taken(queue)) is Settlement.APPLIED
    assert (await taken(queue)).attempt == 2


@pytest.mark.slow
async def test_a_naked_job_waits_for_its_delay(queue: WorkQueue) -> None:
    await queue.put("job", b"")
    await queue.nak(await taken(queue), delay_s=0.5)
    assert await queue.take(wait_s=0.1) is None
    assert (await taken(queue)).attempt == 2


async def test_a_job_whose_attempts_are_used_up_is_a_dead_letter(queue: WorkQueue) -> None:
    await bury(queue, "poison")
    assert await queue.take(wait_s=0) is None
    (letter,) = await queue.dead_letters()
    assert (letter.id, letter.payload, letter.attempts) == ("poison", b"poison", 3)
    assert letter.reason == "no luck with poison: é\r\n"
    assert await queue.dead_letter("poison") is not None
    assert await queue.dead_letter("other") is None
    statistics = await queue.statistics()
    assert (statistics.depth, statistics.dead) == (0, 1)


@pytest.mark.slow
async def test_a_job_whose_takers_all_vanish_is_a_dead_letter(short_queue: WorkQueue) -> None:
    await short_queue.put("crash", b"")
    assert (await taken(short_queue)).attempt == 1
    assert (await taken(short_queue)).attempt == 2
    assert await short_queue.take(wait_s=1.5) is None
    (letter,) = await short_queue.dead_letters()
    assert (letter.id, letter.attempts, letter.reason) == ("crash", 2, "its last lease expired")


async def test_a_dead_letter_that_is_requeued_has_all_its_attempts(queue: WorkQueue) -> None:
    await bury(queue, "job")
    assert await queue.requeue("job")
    assert not await queue.requeue("job")
    assert await queue.dead_letters() == []
    job = await taken(queue)
    assert (job.id, job.payload, job.attempt) == ("job", b"job", 1)
    assert await queue.ack(job) is Settlement.APPLIED


async def test_dead_letters_are_listed_oldest_first_and_purged(queue: WorkQueue) -> None:
    for job_id in ("a", "b", "c"):
        await bury(queue, job_id)
    assert [letter.id for letter in await queue.dead_letters()] == ["a", "b", "c"]
    assert [letter.id for letter in await queue.dead_letters(count_max=2)] == ["a", "b"]
    assert await queue.purge_dead("b") == 1
    assert await queue.purge_dead("b") == 0
    assert await queue.purge_dead() == 2
    assert await queue.dead_letters() == []


async def test_depth_leases_and_age_are_told(queue: WorkQueue) -> None:
    empty = await queue.statistics()
    assert (empty.depth, empty.leased, empty.dead, empty.oldest_age_s) == (0, 0, 0, 0)
    for number in range(3):
        await queue.put(f"job-{number}", b"")
    await taken(queue)
    found = await queue.statistics()
    assert (found.depth, found.leased, found.ready) == (3, 1, 2)
    assert 0 <= found.oldest_age_s < 60
