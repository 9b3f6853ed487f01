"""How much the unfinished frames of all connections may hold together, and for how long.

A frame costs what has arrived of it, up to 32 MiB, on each of thousands of connections. So what is
over `FREE_BYTES` counts against one `ByteBudget` of the process, and who finds it spent stops reading:
the peer feels it as a full window. The one that has waited longest goes on all the same until its
frame is whole, for else frames that all wait for the rest would wait for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Protocol

import trio

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.transports.sockets.wire import Wire

FREE_BYTES: Final = 64 * 1024
"""Of each connection; larger than all but a few frames."""


class ByteBudget:
    """Bytes that many share. All methods but `grow` are synchronous."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self._waiting: OrderedDict[object, trio.Event] = OrderedDict()
        self._favoured: object = None

    def take_nowait(self, count: int) -> bool:
        """Take `count` if so much is left."""
        if self.used_bytes + count > self.bytes_max:
            return False
        self.used_bytes += count
        return True

    async def grow(self, owner: object, count: int) -> None:
        """Count `count` bytes that `owner` holds already; wait until it may hold more.

        Safe to cancel: they stay counted.
        """
        self.used_bytes += count
        if self.used_bytes <= self.bytes_max or self._favoured is owner:
            return
        event = self._waiting[owner] = trio.Event()
        self._wake()
        try:
            await event.wait()
        finally:
            self._waiting.pop(owner, None)

    def give_back(self, owner: object, count: int) -> None:
        """`owner` holds `count` bytes less, and is done with its frame."""
        self.used_bytes -= count
        if self._favoured is owner:
            self._favoured = None
        self._wake()

    def _wake(self) -> None:
        while self._waiting and (self._favoured is None or self.used_bytes <= self.bytes_max):
            owner, event = self._waiting.popitem(last=False)
            event.set()
            if self.used_bytes > self.bytes_max:
                self._favoured = owner


class Pending(Protocol):
    """What takes the bytes of one connection, and keeps those that are nothing whole yet."""

    @property
    def pending_bytes(self) -> int:
        """How many it keeps."""
        ...


class Unfinished:
    """What one connection holds of a frame that is not whole. Close it with the connection."""

    __slots__ = ("_budget", "_buffer_bytes", "_decoder", "_held_bytes", "_left_s", "_timeout_s")

    def __init__(
        self, decoder: Pending, budget: ByteBudget, *, buffer_bytes: int, timeout_s: float
    ) -> None:
        self._decoder = decoder
        self._budget = budget
        self._buffer_bytes = buffer_bytes
        self._timeout_s = timeout_s
        self._held_bytes = 0
        self._left_s = timeout_s

    @property
    def is_held(self) -> bool:
        return self._held_bytes > 0

    async def receive(self, wire: Wire) -> bytes:
        """What comes next. Waits first where all connections together hold too much.

        Raises `RemoteProtocolError` if a large frame is not whole within the time given, of which
        only what is spent in here counts, and not the wait for others.
        """
        if self._decoder.pending_bytes <= FREE_BYTES:
            self.close()
            return await wire.receive(self._buffer_bytes)
        if not self._held_bytes:
            self._left_s = self._timeout_s
        more = self._decoder.pending_bytes - FREE_BYTES - self._held_bytes
        self._held_bytes += more
        if more < 0:
            # One of several is whole: the others have as long again.
            self._left_s = self._timeout_s
            self._budget.give_back(self, -more)
        else:
            await self._budget.grow(self, more)
        began = trio.current_time()
        with trio.move_on_after(self._left_s):
            data = await wire.receive(self._buffer_bytes)
            self._left_s = max(0.0, self._left_s - (trio.current_time() - began))
            return data
        raise RemoteProtocolError(
            f"a frame of which {self._decoder.pending_bytes} bytes had come was not whole within "
            f"{self._timeout_s:g} s"
        )

    def close(self) -> None:
        """The frame is whole, or the connection over."""
        if self._held_bytes:
            held, self._held_bytes = self._held_bytes, 0
            self._budget.give_back(self, held)
