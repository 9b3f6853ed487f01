"""The worker's streams on links: on the one that a request came by, or on one dialled (`client.py`)."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol

import trio

from trinamo.runtime.context import Context, State
from trinamo.runtime.errors import ConnectError, KilledError
from trinamo.runtime.protocol.streams.control import Closed, Handshake
from trinamo.runtime.protocol.streams.link_frames import Opening, encode_opening
from trinamo.runtime.protocol.streams.request import ConnectionInfo, StreamType

from ..sockets import TcpOptions
from .input_receiver import InputReceiver
from .lane import LinkLane
from .link import Link
from .response_sender import TcpResponseSender


class Links(Protocol):
    """Where a worker finds the link to open a stream on."""

    def ready(self, connection: ConnectionInfo) -> Link | None:
        """The link for a stream to this caller, if it stands and takes one more."""
        ...

    async def wait_ready(self, connection: ConnectionInfo, context: Context) -> Link:
        """The same, waiting for it if it can come; whoever asks opens its stream at once.

        Raises `ConnectError` if the caller cannot be reached, `KilledError` if the request is
        killed before that.
        """
        ...


class AnsweringLink:
    """A `CallHome` on the link that the request came by: nobody is dialled, and nothing waited for."""

    def __init__(self, link: Link, options: TcpOptions) -> None:
        self._link = link
        self._options = options

    def call_home(
        self, connection: ConnectionInfo, context: Context
    ) -> AbstractAsyncContextManager[TcpResponseSender]:
        """Open the response stream; see `TcpClient`."""
        return LinkedResponse(self, self._options, connection, context)

    def receive_input(
        self, connection: ConnectionInfo, context: Context
    ) -> AbstractAsyncContextManager[InputReceiver]:
        """Open the request stream; see `TcpClient`."""
        return LinkedInput(self, self._options, connection, context)

    def ready(self, connection: ConnectionInfo) -> Link | None:  # noqa: ARG002 -- there is but one
        """The link, unless it is lost."""
        return self._link if self._link.takes_streams else None

    async def wait_ready(self, connection: ConnectionInfo, context: Context) -> Link:  # noqa: ARG002 -- there is but one
        """The link; it is not dialled again."""
        await trio.lowlevel.checkpoint_if_cancelled()
        check_killed(context)
        if not self._link.takes_streams:
            raise ConnectError("the connection that the request came by was lost")
        return self._link


def check_killed(context: Context) -> None:
    """Raise `KilledError` if the request of `context` is killed: nothing is opened for it any more."""
    if context.is_killed:
        raise KilledError("killed before the caller could be called", reason=str(context.reason))


class _Linked:
    """One stream of a link, opened and left by `async with`.

    Neither waits unless it must: for the link to be dialled, and for credit for what is queued.
    """

    stream_type: StreamType

    def __init__(
        self,
        links: Links,
        options: TcpOptions,
        connection: ConnectionInfo,
        context: Context,
    ) -> None:
        self._links = links
        self._options = options
        self._connection = connection
        self._context = context

    async def _open(self) -> tuple[LinkLane, Handshake]:
        connection = self._connection
        link = self._links.ready(connection)
        if link is None or self._context.is_killed:
            link = await self._links.wait_ready(connection, self._context)
        handshake = Handshake(connection.subject, self.stream_type)
        stream = link.ids.give()
        lane = link.add(stream, connection.window_bytes)
        link.send_frame(encode_opening(stream, Opening(handshake, self._options.window_bytes)))
        return lane, handshake


class LinkedResponse(_Linked):
    """A response stream."""

    stream_type = StreamType.RESPONSE
    _lane: LinkLane
    _sender: TcpResponseSender

    async def __aenter__(self) -> TcpResponseSender:
        self._lane, handshake = await self._open()
        self._sender = self._lane.driver = TcpResponseSender(self._lane, self._context)
        self._sender.greeted(handshake)
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

        def limit(state: State) -> None:
            if state is State.KILLED:
                scope.deadline = trio.current_time() + self._options.linger_s

        self._context.on_change(limit)
        try:
            with scope:
                await lane.wait_flushed()
        finally:
            self._context.off_change(limit)
            if not lane.is_flushed:
                lane.say(Closed())
                lane.discard()


class LinkedInput(_Linked):
    """A request stream."""

    stream_type = StreamType.REQUEST
    _receiver: InputReceiver

    async def __aenter__(self) -> InputReceiver:
        lane, handshake = await self._open()
        self._receiver = InputReceiver(self._context, self._options.window_bytes)
        lane.driver = self._receiver
        self._receiver.greeted(lane, handshake)
        return self._receiver

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._receiver.close()
