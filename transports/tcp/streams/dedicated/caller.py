"""The caller's end of connections that carry one stream each: what a worker dialled, served to its end."""

from __future__ import annotations

from contextlib import suppress

import trio

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.streams.codec import Frame, FrameDecoder
from trinamo.runtime.protocol.streams.control import Handshake, parse_frame

from ...sockets import TcpOptions
from ..input_registration import InputRegistration
from ..outbox import Outbox
from ..response_registration import ResponseRegistration
from .controls import ControlWriter
from .lanes import ConnectionLane, WordLane

_BROKE = "the worker's connection broke"
_CLOSED = "this end of the stream closed"


async def serve_response(
    registration: ResponseRegistration,
    stream: trio.SocketStream,
    options: TcpOptions,
    nursery: trio.Nursery,
    handshake: Handshake,
    rest: bytes,
) -> None:
    """Read the answer; `rest` came behind the handshake. Never raises on peer input.

    `nursery` outlives the request, so that Kill can still be said.
    """
    controls = ControlWriter(stream, nursery, linger_s=options.linger_s)
    reading = trio.CancelScope()

    def hung_up() -> None:
        """Give the worker as long to do the same."""
        reading.deadline = min(reading.deadline, trio.current_time() + options.linger_s)
        lane.give(0)

    lane = WordLane(controls, hung_up)
    try:
        with reading:
            registration.called(lane, handshake)
            await _ResponseReader(registration, stream, options, lane).run(rest)
    except RemoteProtocolError as error:
        registration.broken(error)
    except OSError:
        registration.lost(_BROKE)
    finally:
        # Nobody listens any more, and the server's nursery may close before the context ends.
        registration.lost(_CLOSED)
    # Half a control frame must not be cut off by the close that follows.
    await controls.wait_finished()


class _ResponseReader:
    def __init__(
        self,
        registration: ResponseRegistration,
        stream: trio.SocketStream,
        options: TcpOptions,
        lane: WordLane,
    ) -> None:
        self._registration = registration
        self._socket = stream.socket
        self._options = options
        self._lane = lane

    async def run(self, data: bytes) -> None:
        registration, channel, socket = self._registration, self._registration.channel, self._socket
        options = self._options
        decoder = FrameDecoder(
            header_bytes_max=options.header_bytes_max, data_bytes_max=options.data_bytes_max
        )
        unfinished, buffer_bytes = options.unfinished(decoder), options.buffer_bytes
        try:
            while True:
                self._take(decoder.feed(data))
                decoder.check()
                if registration.is_answered:
                    return
                if channel.is_paused:
                    await self._lane.wait_room()
                if decoder.pending_bytes or unfinished.is_held:
                    data = await unfinished.receive(socket)
                else:
                    # Without a detour, and from the socket itself: this is once for every token.
                    data = await socket.recv(buffer_bytes)
                if not data:
                    registration.lost("the worker hung up without an end mark")
                    return
        finally:
            unfinished.close()

    def _take(self, frames: list[Frame]) -> None:
        items: list[bytes] = []
        registration = self._registration
        try:
            for header, data in frames:
                if not header and data:
                    items.append(data)
                    continue
                event = parse_frame((header, data))
                if event is None:
                    continue
                if items:
                    registration.take(items)
                    items = []
                registration.receive(event)
                if registration.is_answered:
                    return
        finally:
            if items:
                registration.take(items)


async def serve_input(
    registration: InputRegistration,
    stream: trio.SocketStream,
    options: TcpOptions,
    handshake: Handshake,
    rest: bytes,
) -> None:
    """Send the input; `rest` came behind the handshake. Never raises on peer input."""
    outbox = Outbox(options.queue_bytes_max)
    why = "the worker hung up before the end mark"
    try:
        async with open_nursery() as nursery:
            lane = ConnectionLane(outbox, lambda: None)
            registration.called(lane, handshake)
            nursery.start_soon(_watch, registration, stream, options, rest, nursery.cancel_scope)
            await outbox.run(stream)
            await stream.send_eof()
            nursery.cancel_scope.deadline = trio.current_time() + options.linger_s
    except trio.BrokenResourceError:
        why = _BROKE
    except RemoteProtocolError as error:
        registration.broken(error)
    finally:
        registration.lost(why)
        outbox.discard()


async def _watch(
    registration: InputRegistration,
    stream: trio.SocketStream,
    options: TcpOptions,
    data: bytes,
    scope: trio.CancelScope,
) -> None:
    """The worker says nothing more; anything but its FIN is a protocol error."""
    # On a request stream the worker has greeted, and has no data to send.
    decoder = FrameDecoder(header_bytes_max=options.header_bytes_max, data_bytes_max=0)
    with suppress(trio.ClosedResourceError):
        while True:
            for frame in decoder.feed(data):
                event = parse_frame(frame)
                if event is not None:
                    registration.receive(event)
            decoder.check()
            data = bytes(await stream.receive_some(options.buffer_bytes))
            if not data:
                scope.cancel()
                return
