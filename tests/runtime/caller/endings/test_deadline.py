"""By when a caller wants its answer: at both ends, and whatever the worker does."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
import trio

from tests.runtime.caller.scripted import called_home, scripted
from tests.runtime.endpoints import UNARY, Cluster, open_cluster
from tests.transports.tcp.ends import eventually
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import DeadlineError, KilledError
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.streams.control import Kill, Opened
from trinamo.runtime.protocol.streams.request import AckStatus
from trinamo.runtime.worker.endpoint import Endpoint

SUMS = EndpointName("ns", "engine", "generate")


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with open_cluster() as cluster:
        yield cluster


class Handlers:
    """Handlers that write down the context of each request."""

    def __init__(self) -> None:
        self.contexts: list[Context] = []

    async def once_and_wait(self, request: int, context: Context) -> AsyncGenerator[int, None]:
        self.contexts.append(context)
        yield request
        await trio.sleep_forever()

    async def wait(self, _: int, context: Context) -> int:
        self.contexts.append(context)
        await trio.sleep_forever()
        raise AssertionError

    async def wait_for_input(
        self, _: int, context: Context, numbers: AsyncIterator[int]
    ) -> AsyncGenerator[int, None]:
        self.contexts.append(context)
        async for number in numbers:
            yield number

    @property
    def reasons(self) -> list[Reason | None]:
        return [context.reason for context in self.contexts]


async def test_a_time_limit_travels_and_ends_both_ends_of_a_stream(cluster: Cluster) -> None:
    handlers = Handlers()
    await cluster.serve("1", handlers.once_and_wait)
    client, context = await cluster.client(), Context("mine")
    before = trio.current_time()
    items: list[int] = []

    async def ask() -> None:
        async with client.stream(7, int, context=context, timeout_s=1) as stream:
            async for item in stream:
                items.append(item)
                assert before < handlers.contexts[0].deadline <= trio.current_time() + 1

    with pytest.raises(DeadlineError):
        await ask()
    assert items in ([7], [])
    await eventually(lambda: set(handlers.reasons) <= {Reason.DEADLINE})
    assert (context.reason, context.deadline, context.child_count) == (None, math.inf, 0)


async def test_a_deadline_that_comes_nearer_ends_the_next_wait(cluster: Cluster) -> None:
    handlers, context = Handlers(), Context("mine")
    await cluster.serve("1", handlers.once_and_wait)
    client = await cluster.client()
    async with client.stream(7, int, context=context, timeout_s=1000) as stream:
        assert await anext(stream) == 7
        context.limit(trio.current_time())
        for _ in range(2):
            with pytest.raises(DeadlineError):
                await anext(stream)
    await eventually(lambda: handlers.reasons == [Reason.DEADLINE])


async def test_the_earlier_of_limit_deadline_and_that_of_the_context_counts(
    cluster: Cluster,
) -> None:
    handlers = Handlers()
    await cluster.serve("1", handlers.once_and_wait)
    client = await cluster.client()
    for number in range(3):
        now, far = trio.current_time(), [1000.0, 1000.0, 1000.0]
        far[number] = 100.0
        context = Context(f"r{number}")
        context.limit(now + far[2])
        async with client.stream(
            1, int, context=context, timeout_s=far[0], deadline=now + far[1]
        ) as stream:
            await anext(stream)
            assert now + 99 < handlers.contexts[-1].deadline < trio.current_time() + 101


async def test_a_silent_worker_is_told_that_the_time_is_up(cluster: Cluster) -> None:
    client, plane = await scripted(cluster, AckStatus.ACCEPTED)

    async def ask() -> None:
        context = Context("mine")
        async with client.stream(1, int, context=context) as stream:
            context.limit(trio.current_time() + 0.01)
            with pytest.raises(DeadlineError):
                await anext(stream)

    cluster.nursery.start_soon(ask)
    async with called_home(cluster, plane) as worker:
        await worker.say(Opened())
        assert await worker.hear() == Kill(Reason.DEADLINE)


async def test_the_wait_for_a_worker_s_call_is_limited_too(cluster: Cluster) -> None:
    client, _ = await scripted(cluster, AckStatus.ACCEPTED)
    with pytest.raises(DeadlineError):
        async with client.stream(1, int, timeout_s=0.05):
            raise AssertionError


async def test_a_deadline_that_is_over_asks_nobody(cluster: Cluster) -> None:
    client, plane = await scripted(cluster)
    with pytest.raises(DeadlineError):
        async with client.stream(1, int, deadline=trio.current_time() - 1):
            raise AssertionError
    with pytest.raises(DeadlineError):
        await client.call(1, int, deadline=trio.current_time() - 1)
    assert plane.sent == []


async def test_an_exchange_waits_no_longer_than_it_may(cluster: Cluster) -> None:
    handlers = Handlers()
    worker = await cluster.serve("1")
    worker.remove(SUMS)
    endpoint = Endpoint(SUMS, request_type=int, bidirectional=handlers.wait_for_input)
    worker.add(endpoint)
    client, context = await cluster.client(), Context("mine")
    async with client.exchange(1, int, context=context, timeout_s=1000) as exchange:
        await exchange.send(3)
        assert await anext(exchange) == 3
        assert handlers.contexts[0].deadline < math.inf
        context.limit(trio.current_time() + 0.01)
        with pytest.raises(DeadlineError):
            await anext(exchange)
        with pytest.raises(DeadlineError):
            await exchange.send(4)
    await eventually(lambda: handlers.reasons == [Reason.DEADLINE])


async def test_a_unary_request_takes_its_deadline_along(cluster: Cluster) -> None:
    handlers = Handlers()
    worker = await cluster.serve("1")
    worker.add(Endpoint(UNARY, unary=handlers.wait))
    client = await cluster.client(UNARY)
    with pytest.raises(DeadlineError):
        await client.call(1, int, timeout_s=1)
    await eventually(lambda: set(handlers.reasons) <= {Reason.DEADLINE})
    assert all(context.deadline < math.inf for context in handlers.contexts)


@pytest.mark.parametrize("reason", Reason)
async def test_a_unary_request_is_killed_with_its_context_and_says_why(
    cluster: Cluster, reason: Reason
) -> None:
    handlers, context = Handlers(), Context("mine")
    worker = await cluster.serve("1")
    worker.add(Endpoint(UNARY, unary=handlers.wait))
    client = await cluster.client(UNARY)

    @cluster.nursery.start_soon
    async def kill() -> None:
        await eventually(lambda: handlers.contexts)
        context.kill(reason)

    with pytest.raises(KilledError) as caught:
        await client.call(1, int, context=context)
    assert caught.value.reason == reason
    await eventually(lambda: handlers.reasons == [reason])
    with pytest.raises(KilledError):
        await client.call(1, int, context=context)
    assert len(handlers.contexts) == 1


@pytest.mark.parametrize("streams", ["dedicated", "multiplexed"])
@pytest.mark.parametrize("verb", ["stop", "kill"])
async def test_every_reason_reaches_the_worker_on_either_carrier(streams: str, verb: str) -> None:
    """Property: whatever ends a request at its caller is what its handler is told."""
    handlers = Handlers()
    async with open_cluster(streams=streams) as cluster:
        await cluster.serve("1", handlers.once_and_wait, stop_grace_s=0.01)
        client = await cluster.client()
        for reason in Reason:
            context = Context(reason)
            async with client.stream(1, int, context=context) as stream:
                await anext(stream)
                (context.stop if verb == "stop" else context.kill)(reason)
                told = handlers.contexts[-1]
                await told.wait_stopped()
                assert (told.stop_reason if verb == "stop" else told.kill_reason) is reason
