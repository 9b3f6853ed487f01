"""Work queues: limits, names, sizes, and brokers that come back."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.conformance.events.queues import LIMITS, _numbers, taken
from tests.conformance.events.receiving import BROKERS, DEBIAN_SERVER, NATS
from tests.conformance.simulated import SimulatedBroker
from tests.transports.nats.brokers import (
    Broker,
    MemoryBrokerUnderTest,
    NatsServerUnderTest,
    private_server,
    wait_away,
)
from tests.worlds import in_world
from trinamo.runtime.errors import (
    DeadlineError,
    OverloadedError,
    RequestError,
    TrinamoError,
    UnavailableError,
)
from trinamo.runtime.planes import EventPlane, PutResult, QueueLimits, Settlement, WorkQueue
from trinamo.transports.servers.binaries import find_nats_server


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


@pytest.fixture(params=["memory", "simulated", NATS])
def mortal_broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    """A broker that the test may kill and start again; what it has stored stays."""
    if request.param == "memory":
        yield MemoryBrokerUnderTest()
        return
    if request.param == "simulated":
        simulated = SimulatedBroker()
        with in_world(simulated.world):
            yield simulated
        return
    with private_server(find_nats_server(), "-js", "-sd", str(tmp_path)) as server:
        yield NatsServerUnderTest(server.url, server)


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


async def test_a_full_queue_refuses_jobs_but_knows_its_duplicates(
    plane: EventPlane, name: str
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
async def test_a_bad_id_is_refused(queue: WorkQueue, job_id: str) -> None:
    with pytest.raises(RequestError):
        await queue.put(job_id, b"")


async def test_bad_names_sizes_and_delays_are_refused(plane: EventPlane, queue: WorkQueue) -> None:
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
    plane: EventPlane, queue: WorkQueue
) -> None:
    assert queue.name in await plane.work_queue_names()
    async with plane.work_queue(queue.name) as again:
        assert again.limits == LIMITS
    with pytest.raises(UnavailableError):
        async with plane.work_queue("nobody-made-this"):
            pass


async def test_limits_named_anew_are_in_force(plane: EventPlane, queue: WorkQueue) -> None:
    await queue.put("job", b"")
    limits = QueueLimits(visibility_timeout_s=20, attempts_max=1, depth_max=7)
    async with plane.work_queue(queue.name, limits=limits) as changed:
        assert await changed.nak(await taken(changed)) is Settlement.DEAD
    async with plane.work_queue(queue.name) as again:
        assert again.limits == limits


async def test_a_cancelled_take_loses_no_job(queue: WorkQueue) -> None:
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


async def cancel_soon(scope: trio.CancelScope, turns: int) -> None:
    for _ in range(turns):
        await trio.lowlevel.checkpoint()
    scope.cancel()


@pytest.mark.slow
async def test_jobs_leases_and_fences_outlive_a_killed_broker(
    mortal_broker: Broker, name: str
) -> None:
    limits = QueueLimits(visibility_timeout_s=30, attempts_max=3)
    with trio.fail_after(60):
        async with mortal_broker.connect() as plane, plane.work_queue(name, limits=limits) as queue:
            for number in range(20):
                await queue.put(f"job-{number}", b"")
            done = [await taken(queue) for _ in range(5)]
            for job in done:
                assert await queue.ack(job) is Settlement.APPLIED
            held = await taken(queue)
            await mortal_broker.stop()
            await wait_away(plane)
            assert await queue.take(wait_s=0) is None
            with pytest.raises(TrinamoError):
                await queue.put("nobody-there", b"", timeout_s=0.3)
            await mortal_broker.start()
            assert await queue.ack(held) is Settlement.APPLIED
            for job in done:
                # The broker may have forgotten the id; the queue has not.
                await queue.put(job.id, b"again")
            rest: list[str] = []
            while (job_or_none := await queue.take(wait_s=2.5)) is not None:
                assert job_or_none.payload == b""
                assert await queue.ack(job_or_none) is Settlement.APPLIED
                rest.append(job_or_none.id)
            rest = [job_id for job_id in rest if job_id != "nobody-there"]
            assert sorted(rest) == sorted(f"job-{number}" for number in range(6, 20))
            assert (await queue.statistics()).depth == 0


@pytest.mark.slow
async def test_a_put_bridges_a_broker_that_comes_back(mortal_broker: Broker, name: str) -> None:
    with trio.fail_after(60):
        async with mortal_broker.connect() as plane, plane.work_queue(name, limits=LIMITS) as queue:
            await mortal_broker.stop()
            await wait_away(plane)
            with pytest.raises(DeadlineError) as caught:
                await queue.put("early", b"", timeout_s=0.2)
            assert caught.value.definite
            async with trio.open_nursery() as nursery:
                nursery.start_soon(queue.put, "late", b"")
                await trio.sleep(0.3)
                await mortal_broker.start()
            assert (await taken(queue)).id == "late"
