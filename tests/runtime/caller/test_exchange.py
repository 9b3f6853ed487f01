"""Request streams: the caller streams its input to the worker that answers, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import pytest
import trio

from tests.runtime.endpoints import Cluster, open_cluster
from tests.transports.tcp.ends import eventually
from trinamo.runtime.context import Context
from trinamo.runtime.errors import (
    DisconnectedError,
    EngineError,
    KilledError,
    RequestError,
)
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.worker.endpoint import Endpoint, InputHandler

SUMS = EndpointName("ns", "engine", "generate")


async def sums(start: int, _: Context, numbers: AsyncIterator[int]) -> AsyncGenerator[int, None]:
    """A running sum: it says nothing before it has heard something."""
    total = start
    async for number in numbers:
        total += number
        yield total


async def serve(cluster: Cluster, instance_id: str, handler: InputHandler) -> None:
    worker = await cluster.serve(instance_id)
    worker.remove(SUMS)
    worker.add(Endpoint(SUMS, request_type=int, bidirectional=handler, input_type=int))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with open_cluster() as cluster:
        yield cluster


async def test_an_answer_may_wait_for_input_that_waits_for_the_answer(cluster: Cluster) -> None:
    await serve(cluster, "1", sums)
    client = await cluster.client()
    async with client.exchange(10, int) as exchange:
        for number in range(1, 50):
            await exchange.send(1)
            assert await anext(exchange) == 10 + number
        await exchange.finish()
        assert [item async for item in exchange] == []


async def test_an_input_larger_than_every_buffer_arrives_whole_and_in_order() -> None:
    async with open_cluster(queue_bytes_max=100) as cluster:
        await serve(cluster, "1", sums)
        client = await cluster.client()
        async with client.exchange(0, int) as exchange, trio.open_nursery() as nursery:

            @nursery.start_soon
            async def send() -> None:
                for _ in range(2000):
                    await exchange.send(1)
                await exchange.finish()

            assert [item async for item in exchange] == list(range(1, 2001))


async def test_an_empty_input_ends_the_answer(cluster: Cluster) -> None:
    await serve(cluster, "1", sums)
    client = await cluster.client()
    async with client.exchange(0, int) as exchange:
        await exchange.finish()
        assert [item async for item in exchange] == []


@pytest.mark.parametrize("sent", [0, 3])
async def test_leaving_before_the_input_is_complete_kills_the_handler(
    cluster: Cluster, sent: int
) -> None:
    """Half an input must not pass for a whole one."""
    ends: list[str] = []

    async def handler(
        start: int, context: Context, numbers: AsyncIterator[int]
    ) -> AsyncGenerator[int, None]:
        try:
            async for total in sums(start, context, numbers):
                yield total
            ends.append("whole")
        finally:
            ends.append("killed" if context.is_killed else "left")

    await serve(cluster, "1", handler)
    client = await cluster.client()
    async with client.exchange(0, int) as exchange:
        for _ in range(sent):
            await exchange.send(1)
            await anext(exchange)
    await eventually(lambda: ends == ["killed"])


async def test_a_handler_that_fails_amid_the_input_ends_both_ways(cluster: Cluster) -> None:
    async def handler(
        _: int, __: Context, numbers: AsyncIterator[int]
    ) -> AsyncGenerator[int, None]:
        async for number in numbers:
            if number:
                raise EngineError("enough")
            yield number

    await serve(cluster, "1", handler)
    client = await cluster.client()
    async with client.exchange(0, int) as exchange:
        await exchange.send(0)
        assert await anext(exchange) == 0
        await exchange.send(1)
        with pytest.raises(EngineError, match="enough"):
            await anext(exchange)
        await eventually(lambda: not cluster.workers["1"].active_count)
        with pytest.raises(DisconnectedError):
            await exchange.send(1)


async def test_an_input_item_that_does_not_decode_is_the_caller_s_fault(cluster: Cluster) -> None:
    await serve(cluster, "1", sums)
    client = await cluster.client()
    async with client.exchange(0, int) as exchange:
        await exchange.send("one")
        with pytest.raises(RequestError, match="input item"):
            await anext(exchange)


async def test_stop_ends_the_input_and_lets_the_handler_finish(cluster: Cluster) -> None:
    async def handler(
        _: int, context: Context, numbers: AsyncIterator[int]
    ) -> AsyncGenerator[int, None]:
        yield sum([number async for number in numbers])
        assert context.is_stopped

    await serve(cluster, "1", handler)
    client = await cluster.client()
    context = Context("r")
    async with client.exchange(0, int, context=context) as exchange:
        await exchange.send(1)
        await exchange.send(2)
        context.stop()
        assert [item async for item in exchange] == [3]
        with pytest.raises(KilledError):
            await exchange.send(3)


async def test_a_worker_that_is_lost_before_the_input_is_replaced_by_another(
    cluster: Cluster,
) -> None:
    """No input was sent yet, so nothing is lost."""
    await serve(cluster, "1", sums)
    await cluster.put("0", {"tcp": "127.0.0.1:1"})
    client = await cluster.client()
    for _ in range(4):
        async with client.exchange(0, int) as exchange:
            assert exchange.instance.id == "1"
            await exchange.send(7)
            await exchange.finish()
            assert [item async for item in exchange] == [7]


async def test_an_endpoint_that_takes_no_input_refuses_it(cluster: Cluster) -> None:
    await cluster.serve("1")
    client = await cluster.client()
    with pytest.raises(RequestError, match="input stream"):
        async with client.exchange(3, int):
            pass
