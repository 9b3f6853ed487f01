"""What a transfer asks of a socket, where the connection is sealed.

TLS carries the handshake, in which both ends tell a random key for what they send from then on. What
follows are pieces: TLS cuts what it seals into records of 16 KiB, and its library copies each several
times. A piece is sealed from the registered memory itself, or, of smaller blocks, from a copy of as many as fit it.
It is opened into a buffer that it is copied out of: nothing of a piece that failed its check reaches the memory. A piece is

    bytes of the rest (4) | AES-256-GCM of some bytes, with its tag

Each key seals one direction of one connection, and the nonce of a piece is its number there: none meets a
key twice, and what was left out, repeated or moved does not open. Both ends tell their keys over TLS, so they
are of this connection alone, and who learns the cluster's secret later opens nothing.
"""

from __future__ import annotations

import socket as stdlib_socket
import struct
from collections.abc import Generator, Iterable
from contextlib import closing
from typing import Any, Final

import trio
from typing_extensions import Buffer

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.transports.sockets.wire import Wire, send_all

PIECE_KEY_BYTES: Final = 32
PIECE_LENGTH: Final = struct.Struct(">I")
PIECE_TAG_BYTES: Final = 16
PIECE_GROWTH: Final = PIECE_LENGTH.size + PIECE_TAG_BYTES
_NONCE_BYTES: Final = 12


class PieceKey:
    """Seals, or opens, the pieces of one direction in their order."""

    def __init__(self, key: bytes) -> None:
        # Who has no secret never needs it, and its import takes a while.
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415

        self._cipher, self._unopened = AESGCM(key), InvalidTag
        self._number = 0

    def seal_into(self, data: bytes | memoryview, place: memoryview) -> int:
        """Write the piece for `data` to the start of `place`; how long it is."""
        size = len(data) + PIECE_TAG_BYTES
        PIECE_LENGTH.pack_into(place, 0, size)
        self._cipher.encrypt_into(self._nonce(), data, None, place[PIECE_LENGTH.size :][:size])
        return PIECE_LENGTH.size + size

    def open_into(self, sealed: memoryview, place: memoryview) -> int:
        """Write what a piece holds to `place`, and say how much; `sealed` begins behind its length.

        Raises `RemoteProtocolError` for what is not the next piece of who has the key.
        """
        size = sealed.nbytes - PIECE_TAG_BYTES
        try:
            self._cipher.decrypt_into(self._nonce(), sealed, None, place[:size])
        except self._unopened:
            raise RemoteProtocolError(
                "a piece was changed on its way, or is not the next"
            ) from None
        return size

    def _nonce(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(_NONCE_BYTES, "big")


PIECE_BYTES: Final = 1 << 18
"""As many blocks as fit go in one; so much is sealed and sent while the cache holds it."""
_TURN_BYTES: Final = 1 << 20
"""Sealed, or opened, without the loop's turn: some 0.2 ms."""
_LOW_WATER_BYTES: Final = 1 << 18
_BUFFER_BYTES: Final = _TURN_BYTES + 2 * (PIECE_BYTES + PIECE_GROWTH)
_BUFFERS_MAX: Final = 8
_FIRST_BYTES: Final = 1 << 13
"""Received before there is a buffer: most messages are whole by it."""
_NOTHING: Final = memoryview(b"")


class PieceBuffers:
    """What pieces are sealed and opened in: used again by whichever stream is busy next."""

    def __init__(self) -> None:
        self._spare: list[memoryview] = []

    def take(self) -> memoryview:
        return self._spare.pop() if self._spare else memoryview(bytearray(_BUFFER_BYTES))

    def give_back(self, buffer: memoryview) -> None:
        if len(self._spare) < _BUFFERS_MAX:
            self._spare.append(buffer)


class SealedSocket:
    """Those of trio's methods that `TransferLink` calls, with their meaning."""

    def __init__(self, wire: Wire, buffers: PieceBuffers) -> None:
        assert wire.seal is not None
        self.seal = wire.seal
        """What makes of a message what to send."""
        self._wire, self._buffers = wire, buffers
        self._opened = _NOTHING
        self._sending: PieceKey
        self._receiving: PieceKey | None = None

    def change_keys(self, sending: bytes, receiving: bytes) -> None:
        """Go on in pieces, both ways, once both ends have said that they will.

        Raises `RemoteProtocolError` for keys that are none, and where the peer has said more by TLS.
        """
        if len(receiving) != PIECE_KEY_BYTES or self._opened:
            raise RemoteProtocolError("the peer did not change to pieces as it should")
        self._sending, self._receiving = PieceKey(sending), PieceKey(receiving)
        self.seal = self._seal
        self._held = self._clear = self._in = _NOTHING
        self._start = self._end = 0
        self._missing = PIECE_LENGTH.size
        self._low_water = 1

    def _seal(self, data: bytes | memoryview) -> bytes:
        pieces = bytearray(len(data) + PIECE_GROWTH * -(-len(data) // PIECE_BYTES))
        end = 0
        for at in range(0, len(data), PIECE_BYTES):
            part = data[at : at + PIECE_BYTES]
            end += self._sending.seal_into(part, memoryview(pieces)[end:])
        return bytes(pieces)

    async def sendmsg(self, buffers: Iterable[Buffer]) -> int:
        """Send some of the first bytes; how many. Once it returns, or is cancelled, none is read any more."""
        await trio.lowlevel.checkpoint()
        held = self._buffers.take()
        out, count, end, sent = held[PIECE_BYTES:], 0, 0, 0
        try:
            # A view that was released meanwhile is an error here: what was sealed must be sent.
            with closing(_parts(buffers, held[:PIECE_BYTES])) as parts:
                for part in parts:
                    end = self._sending.seal_into(part, out)
                    count += part.nbytes
                    part.release()
                    sent = self._wire.send(out[:end])
                    if sent < end or count >= _TURN_BYTES:
                        break
            await send_all(self._wire, out[sent:end])
        finally:
            self._buffers.give_back(held)
        return count

    async def send(self, data: Buffer) -> int:
        """As `sendmsg`."""
        return await self.sendmsg([data])

    async def recvmsg_into(self, views: Iterable[memoryview]) -> tuple[int, list[Any], int, Any]:
        """Fill the first views with what has come; only the count means something. 0 at the end."""
        if not self._opened:
            await self._open_next()
        count = 0
        for view in views:
            at = 0
            while self._opened and at < view.nbytes:
                part = self._opened[: view.nbytes - at]
                view[at : at + part.nbytes] = part
                at += part.nbytes
                self._opened = self._opened[part.nbytes :] or self._next_opened()
            count += at
        return count, [], 0, None

    async def recv(self, bytes_max: int) -> bytes:
        """What has come, so much at most; empty at the end."""
        if not self._opened:
            await self._open_next()
        part = bytes(self._opened[:bytes_max])
        self._opened = self._opened[len(part) :] or self._next_opened()
        return part

    async def recv_into(self, view: memoryview) -> int:
        """As `recvmsg_into`."""
        return (await self.recvmsg_into([view]))[0]

    async def _open_next(self) -> None:
        """Open what comes next; nothing is open at the end of the stream."""
        if self._receiving is None:
            self._opened = memoryview(await self._wire.receive(PIECE_BYTES))
            return
        while not self._opened:
            if not await self._receive():
                return
            self._opened = self._next_opened()

    def _next_opened(self) -> memoryview:
        """What the next piece holds, if it is there to its end; else nothing."""
        if self._receiving is None:
            return _NOTHING
        held, self._missing = self._end - self._start, PIECE_LENGTH.size
        if held < PIECE_LENGTH.size:
            return _NOTHING
        (size,) = PIECE_LENGTH.unpack_from(self._in, self._start)
        if not PIECE_TAG_BYTES < size <= PIECE_BYTES + PIECE_TAG_BYTES:
            raise RemoteProtocolError(f"a piece of {size} bytes; up to {PIECE_BYTES} are taken")
        self._missing = PIECE_LENGTH.size + size
        if held < self._missing:
            return _NOTHING
        sealed = self._in[self._start :][PIECE_LENGTH.size : self._missing]
        self._start += self._missing
        return self._clear[: self._receiving.open_into(sealed, self._clear)]

    async def _receive(self) -> bool:
        """Wait for what is missing of the next piece; False if the stream ends before."""
        if self._start == self._end:
            self._start = self._end = 0
            self._missing = PIECE_LENGTH.size
            if not (self._held and self._wire.socket.is_readable()):
                return await self._receive_first()
        elif self._start + self._missing > self._in.nbytes:
            held = bytes(self._in[self._start : self._end])
            self._in[: len(held)] = held
            self._start, self._end = 0, len(held)
        # Wake up for the rest of a piece, not for every segment. `_next_opened` has left no whole
        # piece in the buffer, so some of it is missing. The kernel reads a negative number as the
        # largest one, and the reader would wait for bytes that the peer does not send.
        missing = self._missing - (self._end - self._start)
        assert missing > 0, "a whole piece is in the buffer, and was not opened"
        self._wake_at(min(missing, _LOW_WATER_BYTES))
        received = await self._wire.socket.recv_into(self._in[self._end :])
        self._end += received
        return bool(received)

    async def _receive_first(self) -> bool:
        """Wait for anything, while others use the buffer."""
        if self._held:
            self._buffers.give_back(self._held)
            self._held = self._clear = self._in = _NOTHING
        self._wake_at(1)
        first = await self._wire.socket.recv(_FIRST_BYTES)
        self._held = self._buffers.take()
        self._clear, self._in = self._held[:PIECE_BYTES], self._held[PIECE_BYTES:]
        self._in[: len(first)] = first
        self._end = len(first)
        return bool(first)

    def _wake_at(self, count: int) -> None:
        if count != self._low_water:
            self._low_water = count
            self._wire.socket.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_RCVLOWAT, count)


def _parts(buffers: Iterable[Buffer], place: memoryview) -> Generator[memoryview]:
    """The bytes of all buffers, in parts of a piece at most.

    What is smaller is copied to `place` with what follows it, which each part overwrites.
    """
    end = 0
    for buffer in buffers:
        with memoryview(buffer) as view:
            for at in range(0, view.nbytes, PIECE_BYTES):
                part = view[at : at + PIECE_BYTES]
                if end + part.nbytes > PIECE_BYTES:
                    yield place[:end]
                    end = 0
                if part.nbytes == PIECE_BYTES:
                    yield part
                else:
                    place[end : end + part.nbytes] = part
                    end += part.nbytes
    if end:
        yield place[:end]
