"""The worker's streams on links: on the one that a request came by, or on one dialled (`client.py`)."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import trio

from trinamo.runtime.context import Context, Reason, State
from trinamo.runtime.errors import (
    ConnectError,
    KilledError,
    LocalProtocolError,
    RemoteProtocolError,
    TrinamoError,
)
from trinamo.runtime.protocol.streams.control import (
    Closed,
    Control,
    Data,
    Declined,
    Failed,
    Handshake,
    Opened,
    Refused,
    Sentinel,
    Stop,
)
from trinamo.runtime.protocol.streams.link_frames import Opening, encode_opening
from trinamo.runtime.protocol.streams.machine import Role
from trinamo.runtime.protocol.streams.request import ConnectionInfo, StreamType
from trinamo.runtime.protocol.streams.request_stream import request_stream
from trinamo.runtime.protocol.streams.response_stream import WorkerHalf, response_stream

from ..sockets import TcpOptions
from .channel import Channel
from .link import Driver, Link, LinkLane

_log = logging.getLogger("trinamo.tcp")


class TcpResponseSender(Driver):
    """The handler's end of one response stream: every method returns at once."""

    __slots__ = ("_context", "_is_streaming", "_lane", "_machine")

    def __init__(self, lane: LinkLane, context: Context, handshake: Handshake) -> None:
        self._machine = response_stream(Role.WORKER)
        self._machine.send(handshake)
        self._lane = lane
        self._context = context
        self._is_streaming = False
        """The one state of ours that is asked for with every token."""

    @property
    def is_over(self) -> bool:
        """Whether the stream has ended, whoever ended it: nothing more is said on it."""
        return self._machine.ended is not None

    # --- the handler's side ---

    def send_nowait(self, item: bytes) -> bool:
        """Send one item; False once the stream's bound is reached, then wait for `on_room`.

        After a Kill items are dropped and it is always False: a handler that never waits otherwise
        would not notice that its scope is cancelled.
        """
        if not self._is_streaming:
            ended = self._machine.ended
            if ended is not None and ended.by is Role.CALLER:
                return False
            raise LocalProtocolError(f"an item in state {self._machine!r}")
        assert item, "an empty item would be an empty frame, which means nothing"
        return self._lane.put(item)

    def on_room(self, listener: Callable[[], None]) -> None:
        self._lane.on_room(listener)

    def open(self) -> None:
        self._say(Opened())

    def finish(self) -> None:
        self._say(Sentinel())

    def fail(self, error: TrinamoError) -> None:
        """The handler failed: a declining prologue before `open`, a `failed` frame after it."""
        opening = self._machine.states[Role.WORKER] is WorkerHalf.OPENING
        self._say(Declined(error) if opening else Failed(error))

    def _say(self, event: Opened | Declined | Sentinel | Failed) -> None:
        if self.is_over:
            return
        self._machine.send(event)
        self._lane.say(event)
        self._is_streaming = isinstance(event, Opened)

    # --- what the caller says ---

    def take(self, items: list[bytes]) -> None:
        self._machine.receive(Data(items[0]))

    def receive(self, event: Control) -> None:
        self._machine.receive(event)
        if isinstance(event, Stop):
            self._context.stop(event.reason)
        elif isinstance(event, Refused):
            _log.warning("request %s: refused by the caller: %s", self._context.id, event.message)
        self._check_end()

    def lost(self, why: str) -> None:
        """FIN or RST: normal after our last word, a Kill before it."""
        if self._machine.allows(Role.CALLER, Closed):
            self._machine.receive(Closed(why))
        self._check_end()

    def broken(self, error: RemoteProtocolError) -> None:
        _log.warning("request %s: the caller broke the protocol: %s", self._context.id, error)
        self._lane.say(Closed())
        self._machine.broken(error)
        self._check_end()

    def _check_end(self) -> None:
        """If the caller has ended it, nobody wants the rest: drop it, and end the handler."""
        ended = self._machine.ended
        if ended is not None and ended.by is Role.CALLER:
            self._is_streaming = False
            self._lane.discard()
            self._context.kill(ended.reason)


class InputReceiver(Driver):
    """An iterator over input items."""

    def __init__(
        self, lane: LinkLane, context: Context, handshake: Handshake, window_bytes: int
    ) -> None:
        self._context = context
        self._machine = request_stream(Role.WORKER)
        self._machine.send(handshake)
        self._lane: LinkLane | None = lane
        self.channel = Channel(self._machine, window_bytes, self._give, self.close)

    def close(self) -> None:
        """No more input is wanted. Synchronous, idempotent."""
        lane, self._lane = self._lane, None
        if lane is not None:
            self._machine.send(Closed())
            lane.say(Closed())
            lane.hang_up()
        self.channel.detach()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """The next item; ends after Sentinel or Stop, raises `KilledError` otherwise."""
        error = self._machine.error
        if error is not None:
            raise error
        return await self.channel.__anext__()

    def _give(self, count: int) -> None:
        if self._lane is not None:
            self._lane.give(count)

    # --- what the caller says ---

    def take(self, items: list[bytes]) -> None:
        self._machine.receive(Data(items[0]))
        if not self.channel.extend(items) and self._lane is not None:
            raise RemoteProtocolError("an item without credit")

    def receive(self, event: Control) -> None:
        had_ended = self._machine.ended is not None
        self._machine.receive(event)
        if isinstance(event, Stop):
            self._context.stop(event.reason)
        ended = self._machine.ended
        if ended is None or had_ended:
            return
        if self._machine.error is None:
            self.channel.ended()
        else:
            self._kill(ended.reason)

    def lost(self, why: str) -> None:
        if self._machine.allows(Role.CALLER, Closed):
            self.receive(Closed(why))

    def broken(self, error: RemoteProtocolError) -> None:
        _log.warning("request %s: the caller broke the protocol: %s", self._context.id, error)
        self._machine.broken(error)
        self._kill(Reason.PROTOCOL_ERROR)

    def _kill(self, reason: Reason) -> None:
        """Drop what has come of it: truncated input is no input."""
        self._context.kill(reason)
        self.channel.abandon(
            KilledError(
                "the input ended without an end mark", reason=str(self._context.reason or reason)
            )
        )
        self.close()


def check_killed(context: Context) -> None:
    """Raise `KilledError` if the request of `context` is killed: nothing is opened for it any more."""
    if context.is_killed:
        raise KilledError("killed before the caller could be called", reason=str(context.reason))


class OpensStreams(ABC):
    """A `CallHome` by links, wherever they come from.

    Opening a stream waits only for its link, and leaving a response only for credit for what is queued.
    """

    def __init__(self, options: TcpOptions) -> None:
        self.options = options

    @abstractmethod
    def ready(self, connection: ConnectionInfo) -> Link | None:
        """The link for a stream to this caller, if it stands and takes one more."""

    @abstractmethod
    async def wait_ready(self, connection: ConnectionInfo, context: Context) -> Link:
        """The same, waiting for it if it can come; whoever asks opens its stream at once.

        Raises `ConnectError` if the caller cannot be reached, `KilledError` if the request is
        killed before that.
        """

    def call_home(self, connection: ConnectionInfo, context: Context) -> LinkedResponse:
        """Open the response stream to the caller, and hold it until there was credit for all of it.

        The caller's Stop and Kill, and its death, reach `context` while inside. After a Kill from
        the caller nothing more is sent. Leaving without `finish` or `fail` ends the stream without
        an end mark, which the caller takes for this worker's death. Raises as `wait_ready`, and
        `KilledError` from its end if the request was killed before the caller had credit for the rest.
        """
        return LinkedResponse(self, connection, context)

    @asynccontextmanager
    async def receive_input(
        self, connection: ConnectionInfo, context: Context
    ) -> AsyncIterator[InputReceiver]:
        """Open a request stream; iterate the caller's input items.

        The iterator ends after Sentinel. Stop and Kill reach `context`; a stream that ends without
        an end mark kills it, since truncated input is no input.
        """
        lane, handshake = await self.open(connection, context, StreamType.REQUEST)
        receiver = InputReceiver(lane, context, handshake, self.options.window_bytes)
        lane.driver = receiver
        try:
            yield receiver
        finally:
            receiver.close()

    async def open(
        self, connection: ConnectionInfo, context: Context, stream_type: StreamType
    ) -> tuple[LinkLane, Handshake]:
        """A stream on a link; set the lane's `driver` at once."""
        link = self.ready(connection)
        if link is None or context.is_killed:
            link = await self.wait_ready(connection, context)
        handshake = Handshake(connection.subject, stream_type)
        stream = link.ids.give()
        lane = link.add(stream, connection.window_bytes)
        link.send_frame(encode_opening(stream, Opening(handshake, self.options.window_bytes)))
        return lane, handshake


class AnsweringLink(OpensStreams):
    """On the link that the request came by: nobody is dialled, and nothing waited for."""

    def __init__(self, link: Link, options: TcpOptions) -> None:
        super().__init__(options)
        self._link = link

    def ready(self, connection: ConnectionInfo) -> Link | None:  # noqa: ARG002 -- there is but one
        return self._link if self._link.takes_streams else None

    async def wait_ready(self, connection: ConnectionInfo, context: Context) -> Link:  # noqa: ARG002 -- there is but one
        await trio.lowlevel.checkpoint_if_cancelled()
        check_killed(context)
        if not self._link.takes_streams:
            raise ConnectError("the connection that the request came by was lost")
        return self._link


class LinkedResponse:
    """A response stream, opened and left by `async with`."""

    _lane: LinkLane
    _sender: TcpResponseSender

    def __init__(self, links: OpensStreams, connection: ConnectionInfo, context: Context) -> None:
        self._links, self._connection, self._context = links, connection, context

    async def __aenter__(self) -> TcpResponseSender:
        self._lane, handshake = await self._links.open(
            self._connection, self._context, StreamType.RESPONSE
        )
        self._sender = TcpResponseSender(self._lane, self._context, handshake)
        self._lane.driver = self._sender
        return self._sender

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        lane = self._lane
        if not self._sender.is_over:
            lane.say(Closed())
        lane.hang_up()
        if not lane.is_flushed:
            await self._flush(lane)

    async def _flush(self, lane: LinkLane) -> None:
        """Wait until a slow consumer has given credit for the rest."""
        scope = trio.CancelScope()

        def changed(state: State) -> None:
            if state is State.KILLED:
                scope.deadline = trio.current_time() + self._links.options.linger_s

        self._context.on_change(changed)
        try:
            with scope:
                await lane.wait_flushed()
        finally:
            self._context.off_change(changed)
            if not lane.is_flushed:
                lane.say(Closed())
                lane.discard()
        if scope.cancelled_caught:
            raise KilledError(
                "the request was killed before its caller had taken the whole answer",
                reason=str(self._context.reason),
            )
