"""What a transfer asks of a socket, where the connection is sealed.

Bytes are encrypted from the registered memory, and decrypted into a buffer that they are copied out
of: nothing of a block that failed its record's check reaches the memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import trio
from typing_extensions import Buffer

from trinamo.transports.sockets.wire import Wire, send_all

_PIECE_BYTES: Final = 1 << 18
"""Sealed, or opened, without the loop's turn: some 0.1 ms."""


class SealedSocket:
    """Those of trio's methods that `TransferLink` calls, with their meaning."""

    def __init__(self, wire: Wire) -> None:
        assert wire.seal is not None
        self._wire, self._seal = wire, wire.seal
        self._opened = memoryview(b"")

    async def sendmsg(self, buffers: Iterable[Buffer]) -> int:
        """Send some of the first bytes; how many. Once it returns, or is cancelled, none is read any more."""
        await trio.lowlevel.checkpoint()
        pieces, left = [], _PIECE_BYTES
        for buffer in buffers:
            # A view that was released meanwhile is an error here: what was sealed must be sent.
            piece = memoryview(buffer)[:left]
            pieces.append(piece)
            left -= piece.nbytes
            if not left:
                break
        data = b"".join(map(self._seal, pieces))
        for piece in pieces:
            piece.release()
        await send_all(self._wire, data)
        return _PIECE_BYTES - left

    async def send(self, data: Buffer) -> int:
        """As `sendmsg`."""
        return await self.sendmsg([data])

    async def recvmsg_into(self, views: Iterable[memoryview]) -> tuple[int, list[Any], int, Any]:
        """Fill the first views with what has come; only the count means something. 0 at the end."""
        if not self._opened:
            self._opened = memoryview(await self._wire.receive(_PIECE_BYTES))
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
            self._opened = memoryview(await self._wire.receive(_PIECE_BYTES))
        part, self._opened = self._opened[:bytes_max], self._opened[bytes_max:]
        return bytes(part)

    async def recv_into(self, view: memoryview) -> int:
        """As `recvmsg_into`."""
        return (await self.recvmsg_into([view]))[0]
