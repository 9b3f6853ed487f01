"""The worker's side of the data plane: dial the caller, greet, stream the answer home."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from trinamo.runtime.context import Context, Reason, State
from trinamo.runtime.errors import (
    KilledError,
    LocalProtocolError,
    RemoteProtocolError,
    TrinamoError,
)
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.streams.codec import FrameDecoder, data_prefix
from trinamo.runtime.protocol.streams.control import (
    Closed,
    Declined,
    Failed,
    Handshake,
    Kill,
    Opened,
    Refused,
    Sentinel,
    Stop,
    encode_control,
    parse_frame,
)
from trinamo.runtime.protocol.streams.machine import Machine, Role
from trinamo.runtime.protocol.streams.membership import call_home_proof
from trinamo.runtime.protocol.streams.request import ConnectionInfo, StreamType
from trinamo.runtime.protocol.streams.response_stream import WorkerState, response_stream

from ..sockets import TcpOptions, dial
from .input_stream import InputReceiver
from .outbox import Outbox

__all__ = ["TcpClient", "TcpResponseSender"]

_log = logging.getLogger("trinamo.tcp")


class TcpResponseSender:
    """The handler's end of one response stream: every method but `drain` returns at once."""

    __slots__ = ("_machine", "_outbox", "is_over")

    def __init__(self, machine: Machine, outbox: Outbox) -> None:
        self._machine = machine
        self._outbox = outbox
        self.is_over = False
        """After Sentinel, `failed` or a declining prologue, or once the caller is gone."""

    def send_nowait(self, item: bytes) -> bool:
        """Queue one item; False once `queue_bytes_max` is reached, then await `drain`.

        After a Kill items are dropped and it is always False: a handler that never waits otherwise
        would not notice that its scope is cancelled.
        """
        if self._machine.states[Role.WORKER] is not WorkerState.STREAMING:
            if self._machine.states[Role.WORKER] is WorkerState.DRAINING:
                return False
            raise LocalProtocolError(f"an item in state {self._machine!r}")
        assert item, "an empty item would be an empty frame, which means nothing"
        return self._outbox.put_nowait(data_prefix(len(item)), item)

    def on_room(self, listener: Callable[[], None]) -> None:
        """Call `listener` each time there is room again after a `send_nowait` that was False."""
        self._outbox.on_room(listener)

    async def drain(self) -> None:
        """Wait until at most half the bound is queued."""
        await self._outbox.drain()

    def open(self) -> None:
        """Prologue: the handler has started."""
        self._say(Opened())

    def finish(self) -> None:
        """Sentinel: the answer is complete."""
        self._say(Sentinel(), last=True)

    def fail(self, error: TrinamoError) -> None:
        """The handler failed: a declining prologue before `open`, a `failed` frame after it."""
        opening = self._machine.states[Role.WORKER] is WorkerState.OPENING
        self._say(Declined(error) if opening else Failed(error), last=True)

    def _say(self, event: Opened | Declined | Sentinel | Failed, *, last: bool = False) -> None:
        if self.is_over:
            return
        self._machine.send(event)
        self._outbox.put_nowait(encode_control(event))
        self.is_over = last


class TcpClient:
    """A `CallHome` over TCP."""

    def __init__(self, options: TcpOptions) -> None:
        self.options = options
        self.open_count = 0
        """Connections held now; zero at quiescence."""

    @asynccontextmanager
    async def call_home(
        self, connection: ConnectionInfo, context: Context
    ) -> AsyncIterator[TcpResponseSender]:
        """Dial, greet, and hold the response stream until all that is queued is sent.

        The caller's Stop and Kill, and its death, reach `context` while inside. After a Kill from
        the caller nothing more is sent. Leaving without `finish` or `fail` closes the
        connection without an end mark, which the caller takes for this worker's death.

        Raises `ConnectError` if the caller cannot be reached and `KilledError` if the context is
        killed before that.
        """
        stream = await self._dial(connection, context)
        self.open_count += 1
        try:
            async with stream:
                machine = response_stream(Role.WORKER)
                outbox = Outbox(self.options.queue_bytes_max)
                sender = TcpResponseSender(machine, outbox)
                greeting = self._handshake(connection, StreamType.RESPONSE)
                machine.send(greeting)
                outbox.put_nowait(encode_control(greeting))
                conversation = _Conversation(self.options, stream, machine, outbox, context)
                async with conversation.running():
                    yield sender
                    if sender.is_over:
                        await conversation.hang_up()
        finally:
            self.open_count -= 1

    @asynccontextmanager
    async def receive_input(
        self, connection: ConnectionInfo, context: Context
    ) -> AsyncIterator[InputReceiver]:
        """Dial and greet for a request stream; iterate the caller's input items.

        The iterator ends after Sentinel. Stop and Kill reach `context`; a connection that ends
        without an end mark kills it, since truncated input is no input.
        """
        stream = await self._dial(connection, context)
        self.open_count += 1
        try:
            async with stream:
                greeting = self._handshake(connection, StreamType.REQUEST)
                receiver = InputReceiver(stream, self.options, context)
                receiver.greet(greeting)
                try:
                    await stream.send_all(encode_control(greeting))
                except trio.BrokenResourceError:
                    # The first read says the same; one place decides what it means.
                    _log.debug("request %s: the caller hung up on the greeting", context.id)
                try:
                    yield receiver
                finally:
                    receiver.close()
        finally:
            self.open_count -= 1

    def _handshake(self, connection: ConnectionInfo, stream_type: StreamType) -> Handshake:
        proof = call_home_proof(self.options.secret, connection.subject, stream_type)
        return Handshake(connection.subject, stream_type, proof)

    async def _dial(self, connection: ConnectionInfo, context: Context) -> trio.SocketStream:
        with context.cancelled_by_kill():
            return await dial(connection.address, self.options)
        raise KilledError("killed before the caller could be called", reason=str(context.reason))


class _Conversation:
    """The two pumps of one response connection, worker's end."""

    def __init__(
        self,
        options: TcpOptions,
        stream: trio.SocketStream,
        machine: Machine,
        outbox: Outbox,
        context: Context,
    ) -> None:
        self._options = options
        self._stream = stream
        self._machine = machine
        self._outbox = outbox
        self._context = context
        self._scope = trio.CancelScope()
        self._peer_gone = False
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
        """A Kill ends the pumps: at once if the caller said it, else after a last word."""
        if state is State.KILLED:
            if self._peer_gone:
                self._scope.cancel()
            else:
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
            self._gone(Reason.CONSUMER_DROPPED)
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
                    self._take(parse_frame(frame))
                decoder.check()
        except RemoteProtocolError as error:
            _log.warning("request %s: the caller broke the protocol: %s", self._context.id, error)
            self._gone(Reason.PROTOCOL_ERROR)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self._heard.set()
        self._closed()

    def _take(self, event: object) -> None:
        if event is None:
            return
        self._machine.receive(event)
        match event:
            case Stop():
                self._context.stop(Reason.STOP_REQUESTED)
            case Kill():
                self._gone(Reason.CONSUMER_DROPPED)
            case Refused(code, message):
                _log.warning("request %s: refused by the caller: %s", self._context.id, message)
                self._gone(
                    Reason.PROTOCOL_ERROR if code == "bad_handshake" else Reason.CONSUMER_DROPPED
                )
            case _:
                raise AssertionError(event)

    def _closed(self) -> None:
        """FIN or RST: normal after our last word, a Kill before it."""
        if self._machine.states[Role.WORKER] is WorkerState.DONE:
            return
        if self._machine.allows(Role.CALLER, Closed):
            self._machine.receive(Closed())
        self._gone(Reason.CONSUMER_DROPPED)

    def _gone(self, reason: Reason) -> None:
        """Nobody wants the rest: drop it, and end the handler."""
        self._peer_gone = True
        self._outbox.discard()
        self._context.kill(reason)
        # The context may have been killed before, by someone else.
        self._scope.cancel()
