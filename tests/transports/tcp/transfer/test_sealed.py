"""Blocks under the cluster's secret: what somebody between two machines reads, and can change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import attrs
import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.transports.tcp.ends import dialled
from tests.transports.tcp.transfer.pairs import READ, SIZE, WRITE, Pair, open_pair
from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.runtime.protocol.transfer.description import (
    Direction,
    decode_description,
    encode_description,
)
from trinamo.runtime.protocol.transfer.stream import Hello, encode_message
from trinamo.transports.tcp.sockets import TcpOptions
from trinamo.transports.tcp.transfer.plane import TransferOptions, open_transfer_plane
from trinamo.transports.tcp.transfer.sealed import PieceBuffers

SECRET = TransferOptions(tcp=TcpOptions(secret=bytes(range(32))))
CLEAR = TransferOptions()
GREETED_BYTES = 8192
"""More than all that both ends say before blocks move, and less than the blocks."""


@pytest.fixture(autouse=True)
async def bounded() -> AsyncIterator[None]:
    with trio.fail_after(120):
        yield


@attrs.define(eq=False)
class Between:
    """Who hands a connection on, reads it, and may change what the owner of the blocks sends."""

    heard: bytearray = attrs.field(factory=bytearray)
    change: Callable[[bytes, int], bytes] = lambda data, at: data
    """What goes on of some bytes, which begin so far from the start."""

    async def hand_on(self, port: int, ours: trio.SocketStream) -> None:
        theirs = await trio.open_tcp_stream("127.0.0.1", port)
        async with ours, theirs, trio.open_nursery() as nursery:
            nursery.start_soon(self._copy, ours, theirs, lambda data, at: data)
            await self._copy(theirs, ours, self.change)
            nursery.cancel_scope.cancel()

    async def _copy(
        self,
        source: trio.SocketStream,
        sink: trio.SocketStream,
        change: Callable[[bytes, int], bytes],
    ) -> None:
        at = 0
        with suppress(trio.BrokenResourceError):
            async for data in source:
                self.heard += data
                await sink.send_all(change(bytes(data), at))
                at += len(data)


@asynccontextmanager
async def handed_on(options: TransferOptions, between: Between) -> AsyncIterator[Pair]:
    """A pair whose connection goes by way of somebody."""
    async with (
        open_transfer_plane(options) as ours,
        open_transfer_plane(options) as theirs,
        trio.open_nursery() as nursery,
    ):
        pair = Pair(ours, theirs)
        pair.local = await ours.register(pair.here, block_bytes=SIZE)
        pair.owned = await theirs.register(pair.there, block_bytes=SIZE)
        described = decode_description(pair.owned.describe())
        port = int(described.address.rpartition(b":")[2])
        listeners = await nursery.start(trio.serve_tcp, partial(between.hand_on, port), 0)
        way = b"127.0.0.1:%d" % listeners[0].socket.getsockname()[1]
        described = msgspec.structs.replace(described, address=way)
        pair.remote = await ours.connect(encode_description(described))
        yield pair
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("direction", Direction)
async def test_who_is_between_reads_no_block(direction: Direction) -> None:
    sealed, clear = Between(), Between()
    source = b""
    for options, between in ((SECRET, sealed), (CLEAR, clear)):
        async with handed_on(options, between) as pair:
            source = bytes(pair.there if direction is READ else pair.here)
            await pair.start(direction).wait()
            assert pair.here == pair.there == source
    # What he would see is seen in clear.
    assert source[:64] in clear.heard
    parts = [source[at : at + 16] for at in range(0, len(source), 4096)]
    assert not any(part in sealed.heard for part in parts)


def flipped(data: bytes, at: int) -> bytes:
    if at < GREETED_BYTES:
        return data
    return bytes([data[0] ^ 1]) + data[1:]


def repeated(data: bytes, at: int) -> bytes:
    return data if at < GREETED_BYTES else data + data


def left_out(data: bytes, at: int) -> bytes:
    return data if at < GREETED_BYTES else data[1000:]


@pytest.mark.parametrize("change", [flipped, repeated, left_out])
async def test_what_is_changed_on_the_way_never_reaches_the_memory(
    change: Callable[[bytes, int], bytes],
) -> None:
    async with handed_on(SECRET, Between(change=change)) as pair:
        before, source = bytes(pair.here), bytes(pair.there)
        with pytest.raises(RemoteProtocolError):
            await pair.start(READ).wait()
        # A block is as it was, or begins as the owner's does: nothing else was ever written.
        for at in range(0, len(source), 16):
            part = bytes(pair.here[at : at + 16])
            assert part in (source[at : at + 16], before[at : at + 16])


async def test_the_blocks_move_once_nobody_changes_them_any_more() -> None:
    between = Between(change=flipped)
    async with handed_on(SECRET, between) as pair:
        with pytest.raises(RemoteProtocolError):
            await pair.start(READ).wait()
        between.change = lambda data, at: data
        await pair.start(READ).wait()
        assert pair.here == pair.there
        await pair.start(WRITE).wait()


async def test_a_stream_that_rests_holds_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    out: list[memoryview] = []
    take, give_back = PieceBuffers.take, PieceBuffers.give_back

    def taking(buffers: PieceBuffers) -> memoryview:
        out.append(take(buffers))
        return out[-1]

    def giving_back(buffers: PieceBuffers, buffer: memoryview) -> None:
        out.remove(buffer)
        give_back(buffers, buffer)

    monkeypatch.setattr(PieceBuffers, "take", taking)
    monkeypatch.setattr(PieceBuffers, "give_back", giving_back)
    async with open_pair(SECRET) as pair:
        for direction in Direction:
            assert (await pair.start(direction).wait()).is_verified
            await wait_all_tasks_blocked()
            assert not out


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(33)])
async def test_a_member_that_tells_no_key_is_sent_away(key: bytes) -> None:
    """As one of an older build: blocks never go on in TLS's records, or in clear."""
    async with open_transfer_plane(SECRET) as plane:
        stream = await dialled(plane.mover.address, Purpose.TRANSFERS, SECRET.tcp.secret)
        hello = Hello(2, plane.incarnation, ["crc32"], key)
        await stream.send_all(encode_message(hello))
        with suppress(trio.BrokenResourceError):
            while await stream.receive_some(4096):
                pass
        await stream.aclose()
        assert plane.mover.malformed_count == 1
