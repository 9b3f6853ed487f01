"""The caller's end of one request stream: input items out to the worker that called home."""

from __future__ import annotations

from collections.abc import Callable

import trio

from trinamo.runtime.context import Context, Reason, State
from trinamo.runtime.errors import DisconnectedError, KilledError, RemoteProtocolError, TrinamoError
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.streams.codec import Frame, FrameDecoder, data_prefix
from trinamo.runtime.protocol.streams.control import (
    Closed,
    Data,
    Handshake,
    Kill,
    Sentinel,
    Stop,
    encode_control,
    parse_frame,
)
from trinamo.runtime.protocol.streams.machine import Role
from trinamo.runtime.protocol.streams.request import ConnectionInfo
from trinamo.runtime.protocol.streams.request_stream import request_stream

from ..sockets import TcpOptions
from .outbox import Outbox
from .subject import OpenSubject

__all__ = ["InputRegistration"]


class InputRegistration(OpenSubject):
    """One subject for a worker that wants to be streamed to; also the sender itself.

    Leaving it before `finish` is Kill: the worker must not take half an input for a whole one.
    """

    def __init__(
        self,
        connection: ConnectionInfo,
        context: Context,
        options: TcpOptions,
        forget: Callable[[str], None],
    ) -> None:
        self._machine = request_stream(Role.CALLER)
        self._outbox = Outbox(options.queue_bytes_max)
        self._called = trio.Event()
        self._error: TrinamoError | None = None
        self._ended = False
        self._stop_due = False
        # Last: a context that has ended says so at once.
        super().__init__(connection, context, options, forget)

    def close(self) -> None:
        super().close()
        self._end(Kill())

    def _on_context(self, state: State) -> None:
        self._end(Kill() if state is State.KILLED else Stop())

    def _end(self, event: Sentinel | Stop | Kill) -> None:
        if self._ended:
            return
        if not self._machine.allows(Role.CALLER, type(event)):
            # Stop before the worker has called: say it when it does.
            self._stop_due = isinstance(event, Stop)
            return
        self._ended = True
        self._machine.send(event)
        # Before the call this waits in the outbox, for a worker that may be dialling already.
        self._outbox.put_nowait(encode_control(event))
        self._outbox.close()
        self._called.set()

    async def send(self, item: bytes) -> None:
        """Queue one input item, waiting for the worker's call and while the bound is reached.

        Cancelled while waiting for the call it has queued nothing. Raises `DisconnectedError` if
        the worker is gone and `KilledError` once the request was stopped or killed.
        """
        assert item, "an empty item would be an empty frame, which means nothing"
        await self._called.wait()
        if self._error is not None:
            raise self._error
        if self._ended:
            raise KilledError(
                "the request was ended; no more input is taken",
                reason=self._context.reason or Reason.CONSUMER_DROPPED,
            )
        self._machine.send(Data(item))
        if not self._outbox.put_nowait(data_prefix(len(item)), item):
            await self._outbox.drain()

    async def finish(self) -> None:
        """Say that the input is complete, once the worker has called."""
        await self._called.wait()
        self._end(Sentinel())

    async def run(
        self,
        stream: trio.SocketStream,
        decoder: FrameDecoder,
        handshake: Handshake,
        frames: list[Frame],
    ) -> None:
        self._machine.receive(handshake)
        self._called.set()
        if self._stop_due:
            self._end(Stop())
        broken: RemoteProtocolError | None = None
        try:
            async with open_nursery() as nursery:
                nursery.start_soon(self._watch, stream, decoder, frames, nursery.cancel_scope)
                await self._outbox.run(stream)
                await stream.send_eof()
                nursery.cancel_scope.deadline = trio.current_time() + self._options.linger_s
        except* trio.BrokenResourceError:
            pass
        except* RemoteProtocolError as group:
            broken = next(e for e in group.exceptions if isinstance(e, RemoteProtocolError))
        finally:
            if not self._ended:
                self._ended = True
                self._error = broken or DisconnectedError(
                    "the worker hung up before the input was complete"
                )
            self._outbox.discard()

    async def _watch(
        self,
        stream: trio.SocketStream,
        decoder: FrameDecoder,
        frames: list[Frame],
        scope: trio.CancelScope,
    ) -> None:
        """The worker says nothing more; anything but its FIN is a protocol error."""
        while True:
            for frame in frames:
                event = parse_frame(frame)
                if event is not None:
                    self._machine.receive(event)
            decoder.check()
            data = await stream.receive_some(self._options.buffer_bytes)
            if not data:
                self._machine.receive(Closed())
                scope.cancel()
                return
            frames = decoder.feed(bytes(data))
