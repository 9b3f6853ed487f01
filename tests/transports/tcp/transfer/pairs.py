"""Two tcp planes of one process, and what may be said to one by hand."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing

from tests.transports.tcp.ends import WireStream, dialled
from trinamo.runtime.planes import Transfer, TransferPlane
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.runtime.protocol.transfer.description import (
    Direction,
)
from trinamo.runtime.protocol.transfer.stream import (
    PREFIX,
    Hello,
    TransferMessage,
    decode_message,
    encode_message,
)
from trinamo.transports.tcp.transfer.plane import (
    TcpMover,
    TransferOptions,
    open_transfer_plane,
)

READ, WRITE = Direction.READ, Direction.WRITE
SIZE, BLOCKS = 65536, 64
ALL = list(range(BLOCKS))
OVER_STREAM = TransferOptions(slice_bytes=4 * SIZE)


class Pair:
    """Two planes in one process."""

    def __init__(self, ours: TransferPlane[TcpMover], theirs: TransferPlane[TcpMover]) -> None:
        self.ours, self.theirs = ours, theirs
        self.here = bytearray(random.Random(1).randbytes(BLOCKS * SIZE))
        self.there = bytearray(random.Random(2).randbytes(BLOCKS * SIZE))

    async def connect(self, **more: Any) -> None:
        self.local = await self.ours.register(self.here, block_bytes=SIZE)
        self.owned = await self.theirs.register(self.there, block_bytes=SIZE, **more)
        self.remote = await self.ours.connect(self.owned.describe())

    def start(self, direction: Direction, **more: Any) -> Transfer:
        more.setdefault("deadline_s", 10)
        return self.ours.start(direction, self.local, ALL, self.remote, ALL, **more)


@asynccontextmanager
async def open_pair(
    options: TransferOptions = OVER_STREAM, theirs: TransferOptions | None = None, **more: Any
) -> AsyncIterator[Pair]:
    async with (
        open_transfer_plane(options) as a,
        open_transfer_plane(options if theirs is None else theirs) as b,
    ):
        pair = Pair(a, b)
        await pair.connect(**more)
        yield pair


async def until(transfer: Transfer, count: int) -> None:
    while transfer.confirmed_count < count:
        await trio.lowlevel.checkpoint()


async def greeted(plane: TransferPlane[TcpMover]) -> WireStream:
    stream = await dialled(plane.mover.address, Purpose.TRANSFERS)
    hello = Hello(2, plane.incarnation, ["crc32"])
    await stream.send_all(encode_message(hello))
    answer = await stream.receive_some(4096)
    assert answer
    return stream


async def answer_of(stream: WireStream) -> TransferMessage:
    data = await stream.receive_some(4096)
    header_bytes, _ = PREFIX.unpack_from(data)
    return decode_message(data[PREFIX.size : PREFIX.size + header_bytes])


def frame(message: TransferMessage, data: bytes = b"") -> bytes:
    return encode_message(message, len(data)) + data
