"""The worker's end of connections that carry one stream each: dialled, greeted, and held."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import trio

from trinamo.runtime.context import Context, State
from trinamo.runtime.errors import KilledError, RemoteProtocolError
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.streams.codec import FrameDecoder
from trinamo.runtime.protocol.streams.control import Control, Handshake, encode_control, parse_frame
from trinamo.runtime.protocol.streams.membership import call_home_proof
from trinamo.runtime.protocol.streams.request import ConnectionInfo, StreamType

from ...sockets import TcpOptions, dial
from ..carrier import Lane
from ..input_receiver import InputReceiver
from ..outbox import Outbox
from ..response_sender import TcpResponseSender
from .lanes import ConnectionLane

_FIN = "the caller hung up"


@asynccontextmanager
async def open_response(
    connection: ConnectionInfo, context: Context, options: TcpOptions
) -> AsyncIterator[TcpResponseSender]:
    """Dial, greet, and hold the response stream until all that is queued is sent.

    After a Kill from the caller the body is cancelled.
    """
    stream = await _dial(connection, context, options)
    async with stream:
        outbox, scope = Outbox(options.queue_bytes_max), trio.CancelScope()
        sender = TcpResponseSender(ConnectionLane(outbox, scope.cancel), context)
        greeting = _handshake(connection, StreamType.RESPONSE, options)
        sender.greeted(greeting)
        outbox.put_nowait(encode_control(greeting))
        conversation = _Conversation(options, stream, sender, outbox, context, scope)
        async with conversation.running():
            yield sender
            if sender.is_over:
                await conversation.hang_up()


class _Conversation:
    """The two pumps of one response connection."""

    def __init__(
        self,
        options: TcpOptions,
        stream: trio.SocketStream,
        sender: TcpResponseSender,
        outbox: Outbox,
        context: Context,
        scope: trio.CancelScope,
    ) -> None:
        self._options = options
        self._stream = stream
        self._sender = sender
        self._outbox = outbox
        self._context = context
        self._scope = scope
        self._sent = trio.Event()
        self._heard = trio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._context.on_change(self._on_context)
        try:
            async with open_nursery() as nursery:
                with self._scope:
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._read)
                    yield
                nursery.cancel_scope.cancel()
        finally:
            self._context.off_change(self._on_context)

    def _on_context(self, state: State) -> None:
        """A Kill of our own ends the pumps after a last word; the caller's has done so at once."""
        if state is State.KILLED and not self._sender.is_gone:
            self._scope.deadline = trio.current_time() + self._options.linger_s

    async def hang_up(self) -> None:
        """Send what is queued, half-close, and wait for the caller to do the same."""
        self._outbox.close()
        await self._sent.wait()
        with trio.move_on_after(self._options.linger_s):
            await self._heard.wait()

    async def _write(self) -> None:
        try:
            await self._outbox.run(self._stream)
            await self._stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._sender.lost("the connection broke")
        finally:
            self._sent.set()

    async def _read(self) -> None:
        # The caller has control frames to say, and nothing else.
        decoder = FrameDecoder(header_bytes_max=self._options.header_bytes_max, data_bytes_max=0)
        try:
            while True:
                data = await self._stream.receive_some(self._options.buffer_bytes)
                if not data:
                    break
                for frame in decoder.feed(bytes(data)):
                    event = parse_frame(frame)
                    if event is not None:
                        self._sender.receive(event)
                decoder.check()
        except RemoteProtocolError as error:
            self._sender.broken(error)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self._heard.set()
        self._sender.lost(_FIN)


@asynccontextmanager
async def open_input(
    connection: ConnectionInfo, context: Context, options: TcpOptions
) -> AsyncIterator[InputReceiver]:
    """Dial and greet for a request stream; iterate the caller's input items."""
    stream = await _dial(connection, context, options)
    async with stream:
        greeting = _handshake(connection, StreamType.REQUEST, options)
        receiver = _DialledInput(stream, options, context)
        receiver.greeted(_Mute(), greeting)
        # Broken by the caller, the first read says so: one place decides what it means.
        with suppress(trio.BrokenResourceError):
            await stream.send_all(encode_control(greeting))
        try:
            yield receiver
        finally:
            receiver.close()


class _Mute(Lane):
    """The lane of an end that only reads, from a connection that is closed with it."""

    __slots__ = ()

    has_credit = False

    def say(self, event: Control) -> None:
        pass

    def give(self, count: int) -> None:
        pass

    def hang_up(self) -> None:
        pass

    def discard(self) -> None:
        pass


class _DialledInput(InputReceiver):
    """Reads the socket itself, in the consumer's own task: no other task, nothing to bound."""

    def __init__(self, stream: trio.SocketStream, options: TcpOptions, context: Context) -> None:
        super().__init__(context, options.queue_bytes_max)
        self._socket = stream.socket
        self._decoder = FrameDecoder(
            header_bytes_max=options.header_bytes_max, data_bytes_max=options.data_bytes_max
        )
        self._unfinished = options.unfinished(self._decoder)

    def close(self) -> None:
        self._unfinished.close()
        super().close()

    async def __anext__(self) -> bytes:
        while not (self.channel.buffered_bytes or self.channel.is_ended):
            await self._receive()
        return await super().__anext__()

    async def _receive(self) -> None:
        try:
            data = await self._unfinished.receive(self._socket)
        except RemoteProtocolError as error:
            self.broken(error)
            return
        except (OSError, trio.ClosedResourceError):
            data = b""
        if not data:
            self.lost(_FIN)
            return
        try:
            for header, item in self._decoder.feed(data):
                if item and not header:
                    self.take([item])
                    continue
                event = parse_frame((header, item))
                if event is not None:
                    self.receive(event)
            self._decoder.check()
        except RemoteProtocolError as error:
            self.broken(error)


def _handshake(
    connection: ConnectionInfo, stream_type: StreamType, options: TcpOptions
) -> Handshake:
    proof = call_home_proof(options.secret, connection.subject, stream_type)
    return Handshake(connection.subject, stream_type, proof)


async def _dial(
    connection: ConnectionInfo, context: Context, options: TcpOptions
) -> trio.SocketStream:
    with context.cancelled_by_kill():
        return await dial(connection.address, options)
    raise KilledError("killed before the caller could be called", reason=str(context.reason))
