"""A sealed stream delivers every byte, however it is cut into pieces and segments, and in whatever calls it is read."""

from __future__ import annotations

import random
import socket as stdlib_socket
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import pytest
import trio
from hypothesis import example, given, settings, strategies as st

from trinamo.transports.tcp.transfer import sealed
from trinamo.transports.tcp.transfer.sealed import (
    PIECE_BYTES,
    PIECE_KEY_BYTES,
    PieceBuffers,
    SealedSocket,
)

INT_MAX: Final = (1 << 31) - 1
KEYS: Final = [random.Random(number).randbytes(PIECE_KEY_BYTES) for number in range(2)]
SIZES: Final = st.sampled_from([1, 3, 1_000, 8_180, 30_000, PIECE_BYTES - 1, PIECE_BYTES])
SEGMENTS: Final = st.sampled_from([1, 2, 19, 1_448, 8_192, 65_536, 1 << 20])
VIEWS: Final = st.lists(st.sampled_from([1, 16, 4_096, 65_536]), min_size=1, max_size=3)


class Kernel:
    """The socket of one end, and its wire: readable from `SO_RCVLOWAT` bytes on, as on Linux."""

    peer: Sequence[str] = ()

    def __init__(self) -> None:
        self.socket: Any = self
        self.sent = bytearray()
        self.coming: deque[bytes] = deque()
        self.arrived = bytearray()
        self.low_water = 1

    # --- the wire ------------------------------------------------------------------------------

    def seal(self, data: bytes | memoryview) -> bytes:
        return bytes(data)

    def send(self, data: bytes | memoryview) -> int:
        self.sent += data
        return len(data)

    # --- the socket ----------------------------------------------------------------------------

    def setsockopt(self, level: int, name: int, value: int) -> None:
        assert (level, name) == (stdlib_socket.SOL_SOCKET, stdlib_socket.SO_RCVLOWAT)
        self.low_water = value if value >= 0 else INT_MAX

    def is_readable(self) -> bool:
        return bool(self.arrived)

    async def recv(self, bytes_max: int) -> bytes:
        await trio.lowlevel.checkpoint()
        while len(self.arrived) < self.low_water:
            if not self.coming:
                raise AssertionError(
                    f"the reader waits for {self.low_water} bytes, the peer has sent all,"
                    f" and {len(self.arrived)} are here"
                )
            self.arrived += self.coming.popleft()
        part = bytes(self.arrived[:bytes_max])
        del self.arrived[: len(part)]
        return part

    async def recv_into(self, view: memoryview) -> int:
        part = await self.recv(view.nbytes)
        view[: len(part)] = part
        return len(part)


def opened(number: int, kernel: Kernel) -> SealedSocket:
    wire: Any = kernel
    end = SealedSocket(wire, PieceBuffers())
    end.change_keys(KEYS[number], KEYS[1 - number])
    return end


async def check(
    messages: list[list[int]], segments: list[int], reads: Sequence[int | list[int]]
) -> None:
    """Send each message as its parts, deliver it in these segments, read it in these calls."""
    ours, theirs = Kernel(), Kernel()
    sender, receiver = opened(0, ours), opened(1, theirs)
    data = random.Random(7).randbytes(sum(map(sum, messages)))
    at = 0
    for parts in messages:
        if len(parts) == 1:
            ours.send(sender.seal(data[at : at + parts[0]]))
            at += parts[0]
        else:
            end = at + sum(parts)
            while at < end:
                at += await sender.sendmsg([data[at:end]])
    sent, place, turn = bytes(ours.sent), 0, 0
    while place < len(sent):
        size = segments[turn % len(segments)]
        theirs.coming.append(sent[place : place + size])
        place, turn = place + size, turn + 1
    found, turn = bytearray(), 0
    while (left := len(data) - len(found)) > 0:
        how = reads[turn % len(reads)]
        turn += 1
        if isinstance(how, int):
            part = await receiver.recv(min(how, left))
            assert part
            found += part
            continue
        views = [memoryview(bytearray(size)) for size in how]
        count, _, _, _ = await receiver.recvmsg_into(views)
        assert count
        found += b"".join(views)[:count]
    assert found == data


# Of the last segments of a byte each, thousands would be one example.
STREAMS = st.lists(st.lists(SIZES, min_size=1, max_size=2), min_size=1, max_size=4)
CUTS = st.lists(SEGMENTS, min_size=1, max_size=6).map(lambda cuts: [*cuts, 65_536])
CALLS = st.lists(st.sampled_from([1_000, 65_536]) | VIEWS, min_size=1, max_size=6).map(
    lambda calls: [*calls, 65_536]
)


@settings(max_examples=40)
@given(STREAMS, CUTS, CALLS)
@example([[30_000], [1_000]], [1 << 20], [65_536])
def test_a_sealed_stream_is_read_whole_however_it_is_cut_and_read(
    messages: list[list[int]], segments: list[int], reads: Sequence[int | list[int]]
) -> None:
    """The reader never waits for more bytes than the peer has sent of the piece that is next."""
    trio.run(check, messages, segments, reads)


def test_a_reader_that_leaves_a_whole_piece_in_its_buffer_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def recv(self: Any, bytes_max: int) -> bytes:
        if not self._opened:
            await self._open_next()
        part, self._opened = self._opened[:bytes_max], self._opened[bytes_max:]
        return bytes(part)

    monkeypatch.setattr(sealed.SealedSocket, "recv", recv)
    with pytest.raises(AssertionError):
        trio.run(check, [[30_000], [1_000]], [1 << 20], [65_536])
