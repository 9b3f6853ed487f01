"""The worker's end of a request stream: the caller's input, item by item."""

from __future__ import annotations

from collections import deque
from typing import Self

import trio

from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import KilledError, RemoteProtocolError
from trinamo.runtime.protocol.streams.codec import FrameDecoder
from trinamo.runtime.protocol.streams.control import (
    Closed,
    Data,
    Handshake,
    Kill,
    Refused,
    Sentinel,
    Stop,
    parse_frame,
)
from trinamo.runtime.protocol.streams.machine import Role
from trinamo.runtime.protocol.streams.request_stream import request_stream

from ..sockets import TcpOptions

__all__ = ["InputReceiver"]


class InputReceiver:
    """An iterator over input items that reads the socket itself: no task, no queue to bound."""

    def __init__(self, stream: trio.SocketStream, options: TcpOptions, context: Context) -> None:
        self._stream = stream
        self._options = options
        self._context = context
        self._machine = request_stream(Role.WORKER)
        self._decoder = FrameDecoder(
            header_bytes_max=options.header_bytes_max, data_bytes_max=options.data_bytes_max
        )
        self._unfinished = options.unfinished(self._decoder)
        self._items: deque[bytes] = deque()
        self._complete = False
        self._truncated = False

    def close(self) -> None:
        """The connection is over."""
        self._unfinished.close()

    def greet(self, handshake: Handshake) -> None:
        """Record that the greeting is on its way."""
        self._machine.send(handshake)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """The next item; ends after Sentinel or Stop, raises `KilledError` otherwise."""
        while not self._items:
            if self._complete:
                raise StopAsyncIteration
            if self._truncated:
                raise KilledError(
                    "the input ended without an end mark",
                    reason=str(self._context.reason or Reason.CONSUMER_DROPPED),
                )
            await self._receive()
        return self._items.popleft()

    async def _receive(self) -> None:
        try:
            data = await self._unfinished.receive(self._stream.socket)
        except RemoteProtocolError:
            self._kill(Reason.PROTOCOL_ERROR)
            return
        except (OSError, trio.ClosedResourceError):
            data = b""
        try:
            if not data:
                if self._machine.allows(Role.CALLER, Closed):
                    self._machine.receive(Closed())
                self._kill(Reason.CONSUMER_DROPPED)
                return
            for frame in self._decoder.feed(data):
                event = parse_frame(frame)
                if event is not None:
                    self._machine.receive(event)
                    self._apply(event)
            self._decoder.check()
        except RemoteProtocolError:
            self._kill(Reason.PROTOCOL_ERROR)

    def _apply(self, event: object) -> None:
        match event:
            case Data(payload):
                self._items.append(payload)
            case Sentinel():
                self._complete = True
            case Stop():
                self._complete = True
                self._context.stop(Reason.STOP_REQUESTED)
            case Kill():
                self._kill(Reason.CONSUMER_DROPPED)
            case Refused():
                self._kill(Reason.PROTOCOL_ERROR)
            case _:
                raise AssertionError(event)

    def _kill(self, reason: Reason) -> None:
        self._truncated = True
        self._items.clear()
        self._context.kill(reason)
