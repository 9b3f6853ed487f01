"""A stream that brings nothing any more is closed, and its transfers go on over a new one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

import attrs
import msgspec
import pytest
import trio

from tests.transports.tcp.transfer.pairs import BLOCKS, SIZE, Pair
from tests.transports.tcp.transfer.test_sealed import SECRET
from trinamo.runtime.config.planes import TransferConfig
from trinamo.runtime.errors import RemoteProtocolError, StalledError
from trinamo.runtime.kv.transfer.metrics import TransferMetrics
from trinamo.runtime.kv.transfer.router import TransferRouter, open_transfer_router
from trinamo.runtime.kv.transfer.routes import RoutedMemory, RoutedPeer
from trinamo.runtime.metrics.tallies import Registry
from trinamo.runtime.protocol.transfer.description import (
    Direction,
    decode_description,
    encode_description,
    encode_descriptions,
)
from trinamo.transports.tcp.transfer.plane import open_transfer_plane
from trinamo.transports.tcp.transfer.target import TargetLink

STALL_S = 0.2


@attrs.define(eq=False)
class Proxy:
    """Hands connections on; those open at `swallow` carry nothing more, and stay open."""

    port: int
    connections: int = 0
    swallowed: int = 0
    """The numbers up to this one carry nothing."""

    async def hand_on(self, ours: trio.SocketStream) -> None:
        self.connections += 1
        theirs = await trio.open_tcp_stream("127.0.0.1", self.port)
        async with ours, theirs, trio.open_nursery() as nursery:
            nursery.start_soon(self._copy, theirs, ours, self.connections)
            await self._copy(ours, theirs, self.connections)
            nursery.cancel_scope.cancel()

    async def _copy(self, source: trio.SocketStream, sink: trio.SocketStream, number: int) -> None:
        with suppress(trio.BrokenResourceError):
            async for data in source:
                if number > self.swallowed:
                    await sink.send_all(data)


@attrs.define(eq=False)
class House:
    pair: Pair
    proxy: Proxy
    router: TransferRouter
    metrics: TransferMetrics
    local: RoutedMemory
    peer: RoutedPeer

    async def move(self, direction: Direction, blocks: range) -> None:
        numbers = list(blocks)
        await self.router.move(
            direction, self.local, numbers, self.peer, numbers, deadline_s=60, notify=None
        )


@pytest.fixture
async def house() -> AsyncIterator[House]:
    metrics = TransferMetrics(Registry())
    section = TransferConfig(attempt_timeout_s=STALL_S, probe_timeout_s=60)
    with trio.fail_after(120):
        async with (
            open_transfer_plane(SECRET) as ours,
            open_transfer_plane(SECRET) as theirs,
            trio.open_nursery() as nursery,
            open_transfer_router([ours], metrics=metrics, section=section) as router,
        ):
            pair = Pair(ours, theirs)
            local = await router.register(pair.here, block_bytes=SIZE)
            owned = await theirs.register(pair.there, block_bytes=SIZE)
            described = decode_description(owned.describe())
            proxy = Proxy(int(described.address.rpartition(b":")[2]))
            listeners = await nursery.start(
                partial(trio.serve_tcp, proxy.hand_on, 0, host="127.0.0.1")
            )
            way = b"127.0.0.1:%d" % listeners[0].socket.getsockname()[1]
            offer = encode_description(msgspec.structs.replace(described, address=way))
            peer = await router.connect(encode_descriptions([offer]))
            yield House(pair, proxy, router, metrics, local, peer)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("direction", Direction)
async def test_a_stream_that_brings_nothing_is_closed_and_the_blocks_go_over_a_new_one(
    house: House, direction: Direction, caplog: pytest.LogCaptureFixture
) -> None:
    source = bytes(house.pair.there if direction is Direction.READ else house.pair.here)
    house.proxy.swallowed = house.proxy.connections
    async with trio.open_nursery() as nursery:
        # Two at once: one finds the silence out, and both go on.
        for blocks in (range(BLOCKS // 2), range(BLOCKS // 2, BLOCKS)):
            nursery.start_soon(house.move, direction, blocks)
    assert house.pair.here == house.pair.there == source
    assert house.proxy.connections > 1
    stalled = house.metrics.value(
        "trinamo_transfer_attempts_total", backend="tcp", direction=direction, outcome="stalled"
    )
    assert stalled >= 2
    assert "the transfer connects again by tcp at block" in caplog.text


async def test_statistics_name_the_stall_until_a_probe_has_an_answer(house: House) -> None:
    house.proxy.swallowed = 1 << 30
    async with trio.open_nursery() as nursery:
        nursery.start_soon(house.move, Direction.READ, range(BLOCKS))
        while not (problem := house.router.statistics().chain[0].problem):
            await trio.sleep(STALL_S / 10)
        assert "tcp confirmed no block" in problem
        nursery.cancel_scope.cancel()


async def test_a_stall_that_the_peer_tells_of_is_nonsense_and_begins_nothing_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes at once, so that thousands of attempts would fit into the time of one."""
    asked = 0

    def refuse(*_: object, **__: object) -> None:
        nonlocal asked
        asked += 1
        raise StalledError("of the peer's")

    monkeypatch.setattr(TargetLink, "_admit", refuse)
    with pytest.raises(RemoteProtocolError):
        await house.move(Direction.READ, range(BLOCKS))
    assert asked == 1
