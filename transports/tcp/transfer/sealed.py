"""What a transfer asks of a socket, where the connection is sealed.

TLS carries the handshake, in which both ends tell a random key for what they send from then on. What
follows are pieces: TLS cuts what it seals into records of 16 KiB, and its library copies each several
times, where a piece is sealed from the registered memory itself. It is opened into a buffer that it is
copied out of: nothing of a piece that failed its check reaches the memory. A piece is

    bytes of the rest (4) | AES-256-GCM of some bytes, with its tag

Each key seals one direction of one connection, and the nonce of a piece is its number there: none meets a
key twice, and what was left out, repeated or moved does not open. Both ends tell their keys over TLS, so they
are of this connection alone, and who learns the cluster's secret later opens nothing.
"""

from __future__ import annotations

import socket as stdlib_socket
import struct
from collections.abc import Iterable
from itertools import groupby
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
"""Sealed, or opened, without the loop's turn: some 0.1 ms."""
_LOW_WATER_BYTES: Final = 1 << 17
_ALONE_BYTES: Final = 1 << 13
"""What is smaller is copied into one piece with what follows it."""
_PIECES_MAX: Final = 2 + 2 * PIECE_BYTES // _ALONE_BYTES


class SealedSocket:
    """Those of trio's methods that `TransferLink` calls, with their meaning."""

    def __init__(self, wire: Wire) -> None:
        assert wire.seal is not None
        self.seal = wire.seal
        """What makes of a message what to send."""
        self._wire = wire
        self._opened = memoryview(b"")
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
        self._out = memoryview(bytearray(PIECE_BYTES + _PIECES_MAX * PIECE_GROWTH))
        self._in = memoryview(bytearray(2 * (PIECE_BYTES + PIECE_GROWTH)))
        self._start = self._end = 0
        self._low_water = 1
        self._clear = memoryview(bytearray(PIECE_BYTES))

    def _seal(self, data: bytes | memoryview) -> bytes:
        pieces = []
        for at in range(0, len(data), PIECE_BYTES):
            size = self._sending.seal_into(data[at : at + PIECE_BYTES], self._out)
            pieces.append(bytes(self._out[:size]))
        return b"".join(pieces)

    async def sendmsg(self, buffers: Iterable[Buffer]) -> int:
        """Send some of the first bytes; how many. Once it returns, or is cancelled, none is read any more."""
        await trio.lowlevel.checkpoint()
        left, views = PIECE_BYTES, []
        for buffer in buffers:
            # A view that was released meanwhile is an error here: what was sealed must be sent.
            views.append(memoryview(buffer)[:left])
            left -= views[-1].nbytes
            if not left:
                break
        end = 0
        for is_small, group in groupby(filter(len, views), lambda view: view.nbytes < _ALONE_BYTES):
            for data in [b"".join(group)] if is_small else group:
                end += self._sending.seal_into(data, self._out[end:])
        for view in views:
            view.release()
        await send_all(self._wire, self._out[:end])
        return PIECE_BYTES - left

    async def send(self, data: Buffer) -> int:
        """As `sendmsg`."""
        return await self.sendmsg([data])

    async def recvmsg_into(self, views: Iterable[memoryview]) -> tuple[int, list[Any], int, Any]:
        """Fill the first views with what has come; only the count means something. 0 at the end."""
        if not self._opened:
            await self._open_next()
        count = 0
        for view in views:
            piece = self._opened[: view.nbytes]
            view[: piece.nbytes] = piece
            self._opened = self._opened[piece.nbytes :]
            count += piece.nbytes
            if not self._opened:
                break
        return count, [], 0, None

    async def recv(self, bytes_max: int) -> bytes:
        """What has come, so much at most; empty at the end."""
        if not self._opened:
            await self._open_next()
        part, self._opened = self._opened[:bytes_max], self._opened[bytes_max:]
        return bytes(part)

    async def recv_into(self, view: memoryview) -> int:
        """As `recvmsg_into`."""
        return (await self.recvmsg_into([view]))[0]

    async def _open_next(self) -> None:
        """Open what comes next; nothing is open at the end of the stream."""
        if self._receiving is None:
            self._opened = memoryview(await self._wire.receive(PIECE_BYTES))
            return
        if not await self._holds(PIECE_LENGTH.size):
            return
        (size,) = PIECE_LENGTH.unpack_from(self._in, self._start)
        if not PIECE_TAG_BYTES < size <= PIECE_BYTES + PIECE_TAG_BYTES:
            raise RemoteProtocolError(f"a piece of {size} bytes; up to {PIECE_BYTES} are taken")
        if not await self._holds(PIECE_LENGTH.size + size):
            return
        sealed = self._in[self._start + PIECE_LENGTH.size :][:size]
        self._start += PIECE_LENGTH.size + size
        count = self._receiving.open_into(sealed, self._clear)
        self._opened = self._clear[:count]

    async def _holds(self, count: int) -> bool:
        """Whether so much is there, once it is; False if the stream ends before."""
        while self._end - self._start < count:
            if self._start + count > self._in.nbytes:
                held = bytes(self._in[self._start : self._end])
                self._in[: len(held)] = held
                self._start, self._end = 0, len(held)
            # Woken up for what is missing of a piece, not for every segment.
            low_water = min(count - (self._end - self._start), _LOW_WATER_BYTES)
            if low_water != self._low_water:
                self._low_water = low_water
                self._wire.socket.setsockopt(
                    stdlib_socket.SOL_SOCKET, stdlib_socket.SO_RCVLOWAT, low_water
                )
            received = await self._wire.socket.recv_into(self._in[self._end :])
            if not received:
                return False
            self._end += received
        return True
