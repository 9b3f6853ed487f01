"""A response stream by iteration and by a sink: the same items, the same end, the same blame."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import attrs
import pytest
import trio
import trio.lowlevel

from tests.runtime.endpoints import Cluster
from tests.transports.tcp.ends import eventually
from trinamo.runtime.caller.client import Client, ResponseStream
from trinamo.runtime.caller.record import InstanceStatus
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import (
    DisconnectedError,
    EngineError,
    KilledError,
    RemoteProtocolError,
)
from trinamo.runtime.sinks import Sink


@attrs.define(eq=False)
class Kept(Sink[Any]):
    """Keeps what it is given; `fails_at` an item it raises."""

    items: list[Any] = attrs.field(factory=list)
    has_room: bool = True
    fails_at: Any = None

    def take(self, items: list[Any]) -> bool:
        self.items += items
        if self.fails_at in items:
            raise ZeroDivisionError("the consumer's own mistake")
        return self.has_room


async def iterate(stream: ResponseStream[Any], into: Kept) -> None:
    async for item in stream:
        into.items.append(item)


async def push(stream: ResponseStream[Any], into: Kept) -> None:
    await stream.forward(into)


each_way = pytest.mark.parametrize("consume", [iterate, push])
Consume = Callable[[ResponseStream[Any], Kept], Awaitable[None]]


def is_blamed(client: Client) -> bool:
    """Whether the one instance is to be passed over, were there others."""
    ((_, status, _),) = client.router.statuses()
    return status is InstanceStatus.INHIBITED


@each_way
async def test_all_items_come_in_order_then_the_end(cluster: Cluster, consume: Consume) -> None:
    await cluster.serve("1")
    client, kept = await cluster.client(), Kept()
    async with client.stream(500, int) as stream:
        await consume(stream, kept)
    assert kept.items == list(range(500))


@each_way
async def test_an_item_that_does_not_decode_comes_after_those_before_it_and_is_blamed(
    cluster: Cluster, consume: Consume
) -> None:
    async def spoiled(_: int, __: Context) -> AsyncGenerator[Any, None]:
        yield 1
        yield 2
        yield "three"
        yield 4

    await cluster.serve("1", spoiled)
    client, kept = await cluster.client(), Kept()
    async with client.stream(1, int) as stream:
        with pytest.raises(RemoteProtocolError, match="an item does not decode"):
            await consume(stream, kept)
    assert kept.items == [1, 2]
    assert is_blamed(client)


@each_way
async def test_a_worker_that_breaks_off_is_blamed(cluster: Cluster, consume: Consume) -> None:
    async def breaks_off(_: int, __: Context) -> AsyncGenerator[int, None]:
        yield 0
        raise DisconnectedError("the connection behind it broke")

    await cluster.serve("1", breaks_off)
    client, kept = await cluster.client(), Kept()
    async with client.stream(1, int) as stream:
        with pytest.raises(DisconnectedError):
            await consume(stream, kept)
    assert kept.items == [0]
    assert is_blamed(client)


@each_way
async def test_what_the_handler_raises_is_not_the_worker_s_fault(
    cluster: Cluster, consume: Consume
) -> None:
    async def fails(_: int, __: Context) -> AsyncGenerator[int, None]:
        yield 0
        raise EngineError("no")

    await cluster.serve("1", fails)
    client, kept = await cluster.client(), Kept()
    async with client.stream(1, int) as stream:
        with pytest.raises(EngineError):
            await consume(stream, kept)
    assert kept.items == [0]
    assert not is_blamed(client)


@each_way
async def test_kill_ends_it_at_once(cluster: Cluster, consume: Consume) -> None:
    async def endless(_: int, __: Context) -> AsyncGenerator[int, None]:
        yield 0
        await trio.sleep_forever()

    await cluster.serve("1", endless)
    client, kept, context = await cluster.client(), Kept(), Context("r")
    async with trio.open_nursery() as nursery, client.stream(1, int, context=context) as stream:

        @nursery.start_soon
        async def kill() -> None:
            await eventually(lambda: kept.items)
            context.kill(Reason.DEADLINE)

        with pytest.raises(KilledError):
            await consume(stream, kept)


async def test_what_a_sink_raises_comes_out_and_is_nobody_else_s_fault(cluster: Cluster) -> None:
    """Whatever it is: an error that looks like an undecodable item is the sink's own as well."""
    worker = await cluster.serve("1")
    client, kept = await cluster.client(), Kept(fails_at=1)
    with pytest.raises(ZeroDivisionError):
        async with client.stream(1000, int) as stream:
            await stream.forward(kept)
    await eventually(lambda: not worker.active_count)
    assert not is_blamed(client)


async def test_a_sink_without_room_pauses_its_own_worker_until_it_is_told(
    cluster: Cluster,
) -> None:
    made = 0

    async def endless(count: int, _: Context) -> AsyncGenerator[bytes, None]:
        nonlocal made
        for _number in range(count):
            made += 1
            yield b"x" * 1000

    await cluster.serve("1", endless)
    client, full = await cluster.client(), Kept(has_room=False)
    async with client.stream(100_000, bytes) as stream, trio.open_nursery() as nursery:
        nursery.start_soon(stream.forward, full)
        await eventually(lambda: full.items)
        before = -1
        while before != made:
            before = made
            await trio.sleep(0.05)
        assert made < 100_000
        stopped_at = len(full.items)
        # Another stream of the same worker is not held up.
        other = Kept()
        async with client.stream(3, bytes) as beside:
            await beside.forward(other)
        assert len(other.items) == 3
        assert len(full.items) == stopped_at
        full.has_room = True
        full.room_again()
        await eventually(lambda: len(full.items) == 100_000)
