"""Reading many connections in one task: a token of an answer costs no switch of tasks.

The connections are in an epoll of their own, whose descriptor is what trio waits for. A task for
each, waiting in trio, would be woken, scheduled and registered again for every token: two thirds of
what a token costs.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from typing import Final

import attrs
import trio

from trinamo.runtime.errors import DisconnectedError
from trinamo.runtime.protocol.openai.generate import Delta
from trinamo.runtime.sinks import Ending, Sink, Sleeper

from .answers import StreamedAnswer
from .calls import UpstreamCall
from .client import Response, UpstreamConnection

_READ_BYTES: Final = 1 << 16
_EVENTS_MAX: Final = 256


class Readers:
    """Calls who is registered for a socket each time that it can be read. Linux only."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._listeners: dict[int, Callable[[float], None]] = {}

    def add(self, plain: socket.socket, listener: Callable[[float], None]) -> None:
        """Call `listener`, which must not wait, while there is something to read, or the end.

        It is told the time, which is read once for all that can be read together.
        """
        number = plain.fileno()
        self._epoll.register(number, select.EPOLLIN)
        self._listeners[number] = listener

    def remove(self, plain: socket.socket) -> None:
        """Call it no more; nothing happens if it is not registered. To be done before it is closed."""
        number = plain.fileno()
        if self._listeners.pop(number, None) is not None:
            self._epoll.unregister(number)

    async def run(self) -> None:
        """Read until cancelled."""
        epoll, listeners = self._epoll, self._listeners
        try:
            while True:
                await trio.lowlevel.wait_readable(epoll.fileno())
                now = trio.current_time()
                for number, _ in epoll.poll(0, _EVENTS_MAX):
                    # One before it in this turn may have ended it.
                    if (listener := listeners.get(number)) is not None:
                        listener(now)
        finally:
            epoll.close()


@attrs.define(eq=False)
class PushedStream:
    """One streamed answer: what comes goes to the sink in the turn of whoever reads it.

    That is the reader of all sockets; for a connection that it cannot read, in TLS, or without an
    epoll, the task in `run`.
    """

    _readers: Readers | None
    _connection: UpstreamConnection
    _response: Response
    _answer: StreamedAnswer
    _call: UpstreamCall
    _ending: Ending = attrs.field(factory=Ending)
    _room: Sleeper = attrs.field(factory=Sleeper)
    _is_over: bool = False
    _is_registered: bool = False
    _take: Callable[[list[Delta]], bool] = attrs.field(init=False)

    async def run(self, begun: bytes, sink: Sink[Delta]) -> None:
        """Hand `begun`, and then all that comes, to `sink`; sleeps to the end, or the error."""
        self._take = sink.take
        sink.on_room(self._resume)
        self._register()
        try:
            self._advance(begun)
            is_pushed = self._readers is not None and self._connection.plain is not None
            while not (self._is_over or is_pushed):
                if self._call.is_paused:
                    await self._room.sleep()
                else:
                    self._received(await self._connection.receive(), trio.current_time())
            await self._ending.wait()
        finally:
            self._unregister()
            # Whoever finds room again later wakes nobody.
            self._call.is_paused = False

    def _register(self) -> None:
        if self._readers is not None and (plain := self._connection.plain) is not None:
            self._readers.add(plain, self._readable)
            self._is_registered = True

    def _unregister(self) -> None:
        if self._is_registered:
            assert self._readers is not None
            assert self._connection.plain is not None
            self._is_registered = False
            self._readers.remove(self._connection.plain)

    def _resume(self) -> None:
        if self._call.is_paused:
            self._call.is_paused = False
            self._call.heard()
            self._register()
            self._room.wake()

    def _readable(self, now: float) -> None:
        assert self._connection.plain is not None
        try:
            received = self._connection.plain.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(DisconnectedError(f"the connection to the upstream broke: {error}"))
            return
        self._received(received, now)

    def _received(self, data: bytes, now: float) -> None:
        self._call.heard_at = now
        try:
            if data:
                self._advance(self._response.feed(data))
            else:
                self._response.cut()
                self._advance(b"")
        except Exception as error:  # noqa: BLE001 -- the parser's, or the sink's: it ends this answer
            self._end(error)

    def _advance(self, data: bytes) -> None:
        answer = self._answer
        deltas = answer.feed(data) if data else []
        if deltas:
            self._call.brought_at = self._call.heard_at
        if self._response.is_complete and not answer.is_done and answer.error is None:
            deltas += answer.finish()
        has_room = self._take(deltas) if deltas else True
        if answer.is_done or answer.error is not None:
            self._end(answer.error)
        elif not has_room:
            self._call.is_paused = True
            self._unregister()

    def _end(self, error: Exception | None) -> None:
        self._is_over = True
        self._unregister()
        self._call.is_paused = False
        self._ending.reach(error)
