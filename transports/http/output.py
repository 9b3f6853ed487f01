"""What goes out on one connection: sent at once as far as the socket takes it, else kept and flushed.

What this file does not do: HTTP (`http1/connection.py`).
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.http.shares import Budget, party_of
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.sinks import Changes
from trinamo.transports.sockets.wire import Wire, peer_of

from .refusals import Refusals

WRITE_BYTES: Final = 1 << 16
"""What must be taken within the deadline: the measure of progress."""


class Output:
    """A connection's outgoing bytes, in order. `send` never waits.

    What the socket has no room for is kept, and sent by a task that is started only then. A peer
    that takes nothing of it for `write_timeout_s` breaks the connection, as does an error of the
    socket: `on_broken` is called once, and what is sent afterwards is dropped.
    """

    def __init__(
        self,
        wire: Wire,
        on_broken: Callable[[], None],
        backlogs: Budget,
        party: str,
        config: HttpConfig,
    ) -> None:
        self._wire = wire
        self._on_broken: Callable[[], None] | None = on_broken
        self.nursery: trio.Nursery | None = None
        """For the task that flushes; there is one before anything is sent."""
        self._seal = wire.seal
        self._backlog_bytes_max = config.backlog_bytes_max
        self._write_timeout_s = config.write_timeout_s
        self._backlog = bytearray()
        self._backlogs, self._party = backlogs, party
        self._changed = Changes()
        self._on_room: Callable[[], None] | None = None
        self._room_bytes = -1
        """How little must be unsent for `_on_room`; -1 while nobody was told to stop."""
        self._ends = self._is_flushing = False
        self.sends = 0
        """How often the socket has taken something at once or later."""
        self.is_broken = False
        """A write failed, or was not taken in time; or `drop` was called."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[trio.Nursery]:
        """The nursery of the connection, which flushes, too. Behind it nothing is kept, and nobody hears of a break."""
        try:
            async with open_nursery() as self.nursery:
                yield self.nursery
        finally:
            self.nursery = self._on_broken = None
            self.drop()

    def send(self, data: bytes) -> bool:
        """Send or keep; whether there is room for more."""
        if self.is_broken:
            return True
        if self._seal is not None:
            try:
                data = self._seal(data)
            except OSError:
                self.give_way()
                return True
        if self._backlog:
            self._backlog += data
            self._count()
        else:
            try:
                sent = self._wire.send(data)
            except OSError:
                self.give_way()
                return True
            self.sends += 1
            if sent == len(data):
                return True
            self._backlog += data[sent:]
            # The task that flushes tells of room, so this may be called by it.
            if not self._is_flushing:
                self._is_flushing = True
                assert self.nursery is not None
                self.nursery.start_soon(self._flush)
            self._count()
        if len(self._backlog) < self._backlog_bytes_max:
            return True
        self._room_bytes = self._backlog_bytes_max // 2
        return False

    def on_room(self, listener: Callable[[], None] | None) -> None:
        """Call `listener` each time half the bound is unsent after a `send` that was False.

        Or nothing, because the connection is broken.
        """
        self._on_room = listener

    def end(self) -> None:
        """Send FIN behind everything else; only the first call has an effect."""
        if self._ends:
            return
        farewell, self._seal = self._wire.farewell(), None
        if farewell:
            self.send(farewell)
        self._ends = True
        if not self._backlog:
            self._send_end()

    def drop(self) -> None:
        """Forget what is unsent; nothing is sent any more."""
        self.is_broken = True
        self._backlog.clear()
        self._count()
        self._tell()

    async def wait_flushed(self) -> None:
        """Return once the kernel has everything, or never will."""
        while self._backlog:
            await self._changed.wait()

    async def wait_room(self) -> None:
        """Return once half the bound is unsent, or nothing ever will be."""
        while len(self._backlog) > self._backlog_bytes_max // 2:
            await self._changed.wait()

    async def _flush(self) -> None:
        try:
            while self._backlog:
                taken = 0
                with trio.fail_after(self._write_timeout_s):
                    while self._backlog and taken < WRITE_BYTES:
                        await self._wire.wait_room()
                        # A slice is a copy, but a view would keep the buffer from growing
                        # meanwhile.
                        sent = self._wire.send(bytes(self._backlog[: 4 * WRITE_BYTES]))
                        del self._backlog[:sent]
                        self._count()
                        if sent:
                            taken += sent
                            self.sends += 1
                            self._tell()
        except (OSError, trio.ClosedResourceError, trio.TooSlowError):
            self.give_way()
        self._is_flushing = False
        if self._ends and not self.is_broken:
            self._send_end()

    def _tell(self) -> None:
        if len(self._backlog) <= self._room_bytes or (self.is_broken and self._room_bytes >= 0):
            self._room_bytes = -1
            if self._on_room is not None:
                self._on_room()
        self._changed.notify()

    def _count(self) -> None:
        self._backlogs.hold(self._party, self, len(self._backlog))

    def _send_end(self) -> None:
        try:
            self._wire.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.give_way()

    def give_way(self) -> None:
        """Break the connection; see `Holder`, too."""
        if not self.is_broken:
            self.drop()
            if self._on_broken is not None:
                self._on_broken()


class WiredConnection(ABC):
    """What connections of both versions of HTTP have: a wire, whoever answers, and an output."""

    def __init__(
        self,
        wire: Wire,
        config: HttpConfig,
        refusals: Refusals,
        answer: Callable[[Any, trio.socket.SocketType], Awaitable[None]],
        on_phase: Callable[[Any], None],
        backlogs: Budget,
    ) -> None:
        self.socket, self.dates = wire.socket, refusals.dates
        self.address = peer_of(self.socket)
        self._wire, self._config, self._refusals = wire, config, refusals
        self._answer, self._on_phase = answer, on_phase
        self._backlogs, self._party = backlogs, party_of(self.address)
        self.output = Output(wire, self.abort, backlogs, self._party, config)

    @abstractmethod
    def abort(self) -> None:
        """Close with RST, now, dropping what is unsent."""
