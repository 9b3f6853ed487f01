"""Unary and bidirectional endpoints of a worker."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
import pytest
import trio
import trio.testing

from tests.runtime.endpoints import UNARY, Cluster, open_cluster
from tests.runtime.worker.asking import PAYLOAD
from tests.transports.tcp.ends import eventually
from trinamo.runtime.context import Context
from trinamo.runtime.errors import (
    DeadlineError,
    EngineError,
    OverloadedError,
    RequestError,
    TrinamoError,
    UnavailableError,
)
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.streams.request import AckStatus, Envelope
from trinamo.runtime.worker.endpoint import Endpoint


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with open_cluster() as cluster:
        yield cluster


# --- unary ---------------------------------------------------------------------------------------


async def test_unary_requests_return_raise_and_are_bounded(cluster: Cluster) -> None:
    worker = await cluster.serve("1", requests_max=1)
    release = trio.Event()

    async def echo(request: str, _: Context) -> str:
        if request == "wait":
            await release.wait()
        if request == "raise":
            raise ZeroDivisionError("by zero")
        if request == "exit":
            raise SystemExit("done")
        return request

    worker.add(Endpoint(UNARY, unary=echo, request_type=str))
    client = await cluster.client(UNARY)
    assert await client.call("hello", str) == "hello"
    with pytest.raises(EngineError, match="by zero"):
        await client.call("raise", str)
    with pytest.raises(EngineError, match="SystemExit: done"):
        await client.call("exit", str)
    with pytest.raises(RequestError):
        await client.call(1, str)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.call, "wait", str)
        await eventually(lambda: worker.active_count == 1)
        with pytest.raises(OverloadedError):
            await client.call("hello", str)
        release.set()
    release = trio.Event()
    with pytest.raises(DeadlineError):
        await client.call("wait", str, timeout_s=0.02)
    await worker.wait_idle()


async def test_a_value_that_a_shutdown_stopped_is_none(cluster: Cluster) -> None:
    async def heed(_: str, context: Context) -> str:
        await context.wait_stopped()
        return "half"

    worker = await cluster.serve("1")
    worker.add(Endpoint(UNARY, unary=heed, request_type=str))
    client = await cluster.client(UNARY)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask() -> None:
            with pytest.raises(UnavailableError, match="the worker shut down"):
                await client.call("hello", str)

        await eventually(lambda: worker.active_count == 1)
        worker.stop_all()


async def test_a_bidirectional_handler_gets_the_input_and_its_truncation(cluster: Cluster) -> None:
    worker = await cluster.serve("1")
    seen: list[int] = []

    async def handler(_: int, __: Context, items: AsyncIterator[int]) -> AsyncGenerator[int, None]:
        async for item in items:
            seen.append(item)
            yield item * 2

    name = EndpointName("ns", "engine", "sum")
    worker.add(Endpoint(name, bidirectional=handler, input_type=int))
    for is_complete in (True, False):
        mine = Context("r")
        with cluster.home.register(mine) as answer, cluster.home.register_input(mine) as asked:
            request = Envelope(
                id=f"r{is_complete}",
                endpoint=str(name),
                response=answer.connection,
                request=asked.connection,
            )
            assert worker.admit(request, PAYLOAD).status is AckStatus.ACCEPTED
            for number in range(3):
                await asked.send(msgspec.msgpack.encode(number))
            if is_complete:
                await asked.finish()
                items = [msgspec.msgpack.decode(item) async for item in answer.channel]
                assert items == [0, 2, 4]
            else:
                await anext(answer.channel)
                asked.close()
                with pytest.raises(TrinamoError):
                    [item async for item in answer.channel]
        await worker.wait_idle()
