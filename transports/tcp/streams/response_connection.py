"""The caller's end of one response connection: frames in, items and one terminal out.

The reader is a task of the server, not of the request, so that a consumer which leaves while it
is being cancelled need not wait for anything: `close()` puts Kill on the wire without a
checkpoint, and the reader drops what still arrives until the worker hangs up.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from trinamo.runtime.context import Context, Reason, State
from trinamo.runtime.errors import DisconnectedError, KilledError, RemoteProtocolError
from trinamo.runtime.protocol.streams.codec import Frame, FrameDecoder
from trinamo.runtime.protocol.streams.control import (
    Closed,
    Control,
    Data,
    Declined,
    Failed,
    Handshake,
    Kill,
    Opened,
    Sentinel,
    Stop,
    encode_control,
    parse_frame,
)
from trinamo.runtime.protocol.streams.machine import Role
from trinamo.runtime.protocol.streams.request import ConnectionInfo
from trinamo.runtime.protocol.streams.response_stream import (
    CallerState,
    WorkerState,
    response_stream,
)

from ..sockets import TcpOptions
from .channel import Channel
from .controls import ControlWriter
from .subject import OpenSubject

__all__ = ["ResponseRegistration"]

_ENDED = (WorkerState.DONE, WorkerState.TRUNCATED, WorkerState.DRAINING)


class ResponseRegistration(OpenSubject):
    """One subject and, once the worker has called, its connection."""

    def __init__(
        self,
        connection: ConnectionInfo,
        context: Context,
        options: TcpOptions,
        forget: Callable[[str], None],
        nursery: trio.Nursery,
    ) -> None:
        self._nursery = nursery
        """Outlives the request, so that Kill can still be said."""
        self._machine = response_stream(Role.CALLER)
        self._controls: ControlWriter | None = None
        self._reading: trio.CancelScope | None = None
        self.channel = Channel(options.queue_bytes_max, self._drop)
        # Last: a context that has ended says so at once.
        super().__init__(connection, context, options, forget)

    def close(self) -> None:
        super().close()
        # Ended on this side only, such as by an instance that left discovery, the worker still works.
        if not self.channel.is_ended or self._machine.states[Role.WORKER] not in _ENDED:
            self._kill(Reason.CONSUMER_DROPPED)

    # --- what our side decides ---

    def _drop(self) -> None:
        """The consumer's sink has failed: to the worker it has left."""
        self._kill(Reason.CONSUMER_DROPPED)

    def _on_context(self, state: State) -> None:
        if state is State.KILLED:
            self._kill(self._context.reason or Reason.CONSUMER_DROPPED)
        elif state is State.STOPPED:
            self._say(Stop())

    def _kill(self, reason: Reason) -> None:
        self.channel.abandon(KilledError(f"the request was killed: {reason}", reason=reason))
        self._say(Kill())
        self._hang_up()

    def _say(self, event: Stop | Kill) -> None:
        """Put a control frame on the wire, or leave it for the moment the worker calls."""
        if self._controls is not None and self._machine.allows(Role.CALLER, type(event)):
            self._machine.send(event)
            self._controls.put(encode_control(event))

    def _hang_up(self) -> None:
        """Half-close after what is queued, and give the worker `linger_s` to do the same."""
        if self._controls is not None:
            self._controls.finish()
        if self._reading is not None:
            self._reading.deadline = trio.current_time() + self._options.linger_s

    # --- what the worker says ---

    async def run(
        self,
        stream: trio.SocketStream,
        decoder: FrameDecoder,
        handshake: Handshake,
        frames: list[Frame],
    ) -> None:
        options = self._options
        self._machine.receive(handshake)
        self.channel.call()
        self._controls = ControlWriter(stream, self._nursery, linger_s=options.linger_s)
        try:
            with trio.CancelScope() as self._reading:
                self._catch_up()
                await self._read(stream, decoder, frames)
        except RemoteProtocolError as error:
            self.channel.fail(error)
            self._say(Kill())
            self._controls.finish()
        except OSError:
            self._disconnected("the worker's connection broke")
        finally:
            self._disconnected("this end of the stream closed")
            # Nobody listens any more, and the server's nursery may close before the context ends.
            controls, self._controls = self._controls, None
        # Half a control frame must not be cut off by the close that follows.
        await controls.wait_finished()

    def _catch_up(self) -> None:
        """Say what was decided before the worker called."""
        if self.channel.is_ended or self._context.is_killed:
            self._say(Kill())
            self._hang_up()
        elif self._context.is_stopped:
            self._say(Stop())

    async def _read(
        self,
        stream: trio.SocketStream,
        decoder: FrameDecoder,
        frames: list[Frame],
    ) -> None:
        machine, channel, socket = self._machine, self.channel, stream.socket
        options = self._options
        unfinished, buffer_bytes = options.unfinished(decoder), options.buffer_bytes
        try:
            while True:
                self._take(frames)
                decoder.check()
                if machine.states[Role.WORKER] is WorkerState.DONE:
                    return
                await channel.wait_room()
                if decoder.pending_bytes or unfinished.is_held:
                    data = await unfinished.receive(socket)
                else:
                    # Without a detour, and from the socket itself: this is once for every token.
                    data = await socket.recv(buffer_bytes)
                if not data:
                    machine.receive(Closed())
                    self._disconnected("the worker hung up without an end mark")
                    return
                frames = decoder.feed(data)
        finally:
            unfinished.close()

    def _take(self, frames: list[Frame]) -> None:
        items: list[bytes] = []
        machine = self._machine
        streaming = machine.states[Role.WORKER] is WorkerState.STREAMING
        try:
            for frame in frames:
                # The one row of the table that is taken for every token, without the detour.
                if streaming and not frame[0] and frame[1]:
                    items.append(frame[1])
                    continue
                event = parse_frame(frame)
                if event is None:
                    continue
                machine.receive(event)
                if items:
                    self.channel.extend(items)
                    items = []
                self._apply(event)
                streaming = machine.states[Role.WORKER] is WorkerState.STREAMING
        finally:
            if items:
                self.channel.extend(items)

    def _apply(self, event: Control) -> None:
        if self.channel.is_ended:
            return
        match event:
            case Opened():
                self.channel.open()
            case Data(payload):
                self.channel.extend([payload])
            case Declined(error) | Failed(error):
                self.channel.fail(error)
            case Sentinel():
                self.channel.complete()
            case _:
                raise AssertionError(event)

    def _disconnected(self, why: str) -> None:
        if self._machine.states[Role.CALLER] is not CallerState.KILLED:
            self.channel.fail(DisconnectedError(f"{why}; the answer is not complete"))
