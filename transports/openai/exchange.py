"""Requests at an upstream, read from many connections in one task: a token costs no switch of tasks.

The connections are in an epoll of their own, whose descriptor is what trio waits for. A task for
each, waiting in trio, would be woken, scheduled and registered again for every token: two thirds of
what a token costs.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from typing import Any, Final, Self

import attrs
import trio

from trinamo.runtime.config.upstream import UpstreamConfig
from trinamo.runtime.context import Context, State
from trinamo.runtime.errors import (
    DisconnectedError,
    OverloadedError,
    RemoteProtocolError,
    RequestError,
    SilentError,
    TrinamoError,
)
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason
from trinamo.runtime.protocol.openai.passing import COMMENT
from trinamo.runtime.sinks import Ending, Sink, Sleeper

from .answers import StreamedAnswer, WholeAnswer, refused
from .client import Connections, Response, UpstreamConnection
from .conversions import events_of, whole_of
from .refusals import refusal_of, refusal_unstreamed

_READ_BYTES: Final = 1 << 16
_EVENTS_MAX: Final = 256


# --- the requests under way at one upstream, and what ends them besides their answers ---


@attrs.define(eq=False)
class UpstreamCall:
    """One request under way, as the watch over stalls sees it.

    As a context it is a scope that Stop, Kill and `fail` leave; whoever leaves it early awaits `left`.
    """

    _calls: dict[UpstreamCall, None]
    _context: Context
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    heard_at: float = attrs.field(factory=trio.current_time)
    """When the last byte came."""
    brought_at: float = attrs.field(factory=trio.current_time)
    """When the last part of the answer did: its head, or an event."""
    is_begun: bool = False
    is_paused: bool = False
    error: DisconnectedError | None = None
    """Why it was given up."""

    def __enter__(self) -> Self:
        self._calls[self] = None
        self._context.on_change(self._cancel)
        self.scope.__enter__()
        return self

    def __exit__(self, *raised: Any) -> bool:  # noqa: PYI036 -- as a scope takes it
        del self._calls[self]
        self._context.off_change(self._cancel)
        return bool(self.scope.__exit__(*raised))

    def _cancel(self, _: State) -> None:
        self.scope.cancel()

    def heard(self) -> None:
        self.heard_at = trio.current_time()

    def fail(self, error: DisconnectedError) -> None:
        """Give it up: its scope is left, and `left` raises `error`."""
        self.error = error
        self.scope.cancel()

    async def left(self) -> None:
        """Return if the scope was left by Stop; raise why it was given up."""
        if self.error is not None:
            raise self.error
        # A kill cancels the scope around this, too.
        await trio.lowlevel.checkpoint()


class Calls:
    """Those of one upstream; `watch` gives up the ones that bring nothing."""

    def __init__(self, section: UpstreamConfig) -> None:
        self._section = section
        self._calls: dict[UpstreamCall, None] = {}

    def call(self, context: Context) -> UpstreamCall:
        return UpstreamCall(self._calls, context)

    async def watch(self) -> None:
        """Look at all of them four times in the shorter limit, until cancelled."""
        section = self._section
        patience_s = section.first_byte_timeout_s
        pause_s = min(section.stall_timeout_s, patience_s) / 4
        while True:
            await trio.sleep(pause_s)
            now = trio.current_time()
            for call in self._calls:
                limit_s = section.stall_timeout_s if call.is_begun else patience_s
                if call.is_paused:
                    call.heard_at = call.brought_at = now
                elif now - call.heard_at > limit_s or now - call.brought_at > patience_s:
                    said = "its answer" if call.is_begun else "the beginning of its answer"
                    call.fail(SilentError(f"the upstream has stalled in {said}"))


# --- reading ---


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
        if deltas and deltas[0].raw != COMMENT:
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


# --- one request, from the head of its answer to the end ---

_OK: Final = 200
_REFUSAL_BYTES_MAX: Final = 1 << 20
"""Of a body with a status that is no 200, or of a whole answer in place of a stream."""
_EVENTS_BYTES_MAX: Final = 1 << 22
"""Of a stream in place of a whole answer: all its events are objects at the same time, some 20 times their bytes."""


@attrs.define
class KeptBytes:
    """The bytes of whole answers that upstreams have brought, and nobody has taken; 0 at quiescence."""

    bytes_held: int = 0


KEPT: Final = KeptBytes()
"""Of this process: it has one memory, however many upstreams."""


@attrs.define(eq=False)
class UpstreamAnswer:
    """The answer to one request: `forward` it once, then `close` it."""

    _connections: Connections
    _calls: Calls
    _readers: Readers | None
    _section: UpstreamConfig
    _context: Context
    _answer: StreamedAnswer | WholeAnswer
    _connection: UpstreamConnection | None = None
    _response: Response = attrs.field(factory=Response)
    _begun: bytes = b""
    _deltas: list[Delta] = attrs.field(factory=list)
    """All of it, if it is whole already."""
    _held: int = 0
    """What of `KEPT` is its own."""

    def take_end(self, event: bytes) -> None:
        """It is no more than this `event`, with which all its tokens have come."""
        self._deltas = [Delta(finish_reason=FinishReason.LENGTH, raw=event)]

    def take(self, connection: UpstreamConnection, response: Response, begun: bytes) -> None:
        """Its head has come, and `begun` of its body."""
        self._connection, self._response, self._begun = connection, response, begun

    async def begin(self, call: UpstreamCall) -> None:
        """Read what is not streamed; raise the error that its status stands for, if not the client's."""
        response, answer = self._response, self._answer
        coding = response.headers.get(b"content-encoding", b"identity").lower()
        if coding != b"identity":
            raise RemoteProtocolError(f"the upstream encodes its answer: {coding[:40]!r}")
        if response.status != _OK:
            body = await self._read_whole(WholeAnswer(_REFUSAL_BYTES_MAX), call)
            refusal = refusal_of(response.status, response.headers, body)
            self._refuse(refusal or response.status, body)
            return
        kind = response.headers.get(b"content-type", b"").lower()
        if isinstance(answer, StreamedAnswer):
            if b"json" in kind:
                body = await self._read_whole(WholeAnswer(_REFUSAL_BYTES_MAX), call)
                events = events_of(body)
                if events is None:
                    self._refuse(refusal_unstreamed(body), body)
                    return
                self._settle()
                self._deltas = answer.feed(events)
                if answer.error is not None:
                    raise answer.error
            return
        body = await self._read_whole(answer, call)
        if b"event-stream" in kind:
            whole = whole_of(body) if len(body) <= _EVENTS_BYTES_MAX else None
            if whole is None:
                # The client's to mend, and no fault of the upstream, which understood the body otherwise.
                raise RequestError("the upstream only streams this answer", param="stream")
            body = whole
        self._deltas = answer.finish(body)
        self._settle()

    def _refuse(self, error: TrinamoError | int, body: bytes) -> None:
        """Raise what is an error; a status is the client's to read, with the body that came."""
        self._settle()
        if not isinstance(error, int):
            raise error
        self._deltas = refused(error, body)

    async def forward(self, sink: Sink[Delta]) -> None:
        """Hand its deltas to `sink`; returns at the complete end.

        Stopped, it ends the request at the upstream, and the answer with `STOP`; cancelled,
        likewise without a word. Raises what ended it, `DisconnectedError` if it stalled.
        """
        if self._deltas:
            sink.take(self._deltas)
            return
        answer = self._answer
        if self._connection is not None and isinstance(answer, StreamedAnswer):
            with self._calls.call(self._context) as call:
                call.is_begun = True
                pushed = PushedStream(self._readers, self._connection, self._response, answer, call)
                await pushed.run(self._begun, sink)
                self._settle()
                return
            self.close()
            await call.left()
        sink.take([Delta(finish_reason=FinishReason.STOP)])

    def close(self) -> None:
        """Close the connection, unless it was given back, and keep nothing. No checkpoint."""
        KEPT.bytes_held -= self._held
        self._held = 0
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _settle(self) -> None:
        if self._connection is not None:
            self._connections.take_back(self._connection, self._response)
            self._connection = None

    async def _read_whole(self, whole: WholeAnswer, call: UpstreamCall) -> bytes:
        connection, response, body = self._connection, self._response, self._begun
        assert connection is not None, "its head has come"
        while True:
            if KEPT.bytes_held + len(body) > self._section.answers_bytes_max:
                # The upstream has worked for it: whoever would wait for room would let it do so again.
                raise OverloadedError(
                    "too many long answers of upstreams are kept at present",
                    bound="answers_bytes_max",
                    value=self._section.answers_bytes_max,
                    definite=False,
                )
            KEPT.bytes_held += len(body)
            self._held += len(body)
            whole.feed(body)
            if response.is_complete:
                return whole.take()
            data = await connection.receive()
            call.heard()
            body = response.feed(data) if data else response.end()
