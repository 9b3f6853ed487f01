"""Ends of links that take no part in the state machines: they say whatever a test wants."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import attrs
import trio

from tests.transports.tcp.ends import RawEnd, accept_member, raw_member
from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.streams.control import Control, Data, Handshake
from trinamo.runtime.protocol.streams.link_frames import (
    Credit,
    LinkMessage,
    Opening,
    encode_event,
    encode_item,
    encode_opening,
)
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.runtime.protocol.streams.multiplex import Arrival, Demultiplexer, StreamIds
from trinamo.runtime.protocol.streams.request import Carrier, ConnectionInfo, StreamType

T = TypeVar("T")
WINDOW = 1 << 16


class _Anything:
    """Whatever stream there may be."""

    def __contains__(self, stream: object) -> bool:
        return True


class RawLink:
    """One end of a link, greeted."""

    def __init__(self, end: RawEnd) -> None:
        self.end = end
        self._demux = Demultiplexer(_Anything(), StreamIds(), item_bytes_max=1 << 30)  # type: ignore[arg-type]
        self._heard: deque[Arrival] = deque()

    async def say(self, stream: int, *words: Control | bytes) -> None:
        """Events and items of one stream, in one piece."""
        await self.write(
            *(
                encode_item(stream, word) if isinstance(word, bytes) else encode_event(stream, word)
                for word in words
            )
        )

    async def write(self, *data: bytes) -> None:
        """Bytes as they are."""
        await self.end.stream.send_all(b"".join(data))

    async def open(self, stream: int, connection: ConnectionInfo, *words: Control | bytes) -> None:
        """Open a stream as a worker does, and say `words` on it."""
        handshake = Handshake(connection.subject, connection.stream_type)
        await self.write(encode_opening(stream, Opening(handshake, WINDOW)))
        await self.say(stream, *words)

    async def hear(self) -> Arrival | None:
        """What comes next for whatever stream; None at the end."""
        while not self._heard:
            try:
                data = bytes(await self.end.stream.receive_some(65536))
            except trio.BrokenResourceError:
                return None
            if not data:
                return None
            self._heard.extend(self._demux.feed(data))
        return self._heard.popleft()

    async def hear_all(self) -> list[Arrival]:
        """Everything until the peer closes."""
        heard: list[Arrival] = []
        while (arrival := await self.hear()) is not None:
            heard.append(arrival)
        return heard


class RawStream:
    """A raw link's first stream, whose events are heard one by one; credit is not."""

    def __init__(self, link: RawLink) -> None:
        self.link = link
        self.stream = link.end.stream
        self._heard: deque[Control] = deque()

    async def say(self, *words: Control | bytes) -> None:
        """Events, and bytes as they are, in one piece."""
        await self.link.write(*map(_encode, words))

    async def hear(self) -> Control | None:
        """The next event, or the last word of the link; None at its end."""
        while not self._heard:
            arrival = await self.link.hear()
            if arrival is None:
                return None
            _, what = arrival
            if isinstance(what, list):
                self._heard.extend(map(Data, what))
            elif not isinstance(what, Credit):
                assert not isinstance(what, (Opening, LinkMessage, RemoteProtocolError)), what
                self._heard.append(what)
        return self._heard.popleft()

    async def hear_all(self) -> list[Control]:
        """Every event until the peer closes the link."""
        heard: list[Control] = []
        while (event := await self.hear()) is not None:
            heard.append(event)
        return heard


def _encode(word: Control | bytes) -> bytes:
    if isinstance(word, bytes):
        return word
    return encode_item(1, word.payload) if isinstance(word, Data) else encode_event(1, word)


@asynccontextmanager
async def worker_link(address: str, secret: bytes = b"") -> AsyncIterator[RawLink]:
    """A worker's end that has greeted the caller at `address`."""
    async with raw_member(address, Purpose.STREAMS, secret) as end:
        yield RawLink(end)


@asynccontextmanager
async def raw_worker(
    connection: ConnectionInfo, *words: Control | bytes, secret: bytes = b""
) -> AsyncIterator[RawStream]:
    """A worker that has called home, opened the one stream of its link, and said `words`."""
    async with worker_link(connection.address, secret) as link:
        stream = RawStream(link)
        handshake = Handshake(connection.subject, connection.stream_type)
        await stream.say(encode_opening(1, Opening(handshake, WINDOW)), *words)
        yield stream


@attrs.frozen
class RawCaller:
    """Where workers call home, with nothing behind it."""

    listener: trio.SocketListener
    address: str

    def connection(
        self,
        stream_type: StreamType = StreamType.RESPONSE,
        *,
        carrier: Carrier = Carrier.DEDICATED,
        subject: str = "subject",
        window_bytes: int = WINDOW,
    ) -> ConnectionInfo:
        """What an envelope says of a caller that takes its streams here."""
        return ConnectionInfo(self.address, subject, stream_type, carrier, window_bytes)

    async def accept_link(self) -> RawLink:
        """A worker's next link, greeted."""
        return RawLink(await accept_member(self.listener, purpose=Purpose.STREAMS))

    async def accept(self) -> RawStream:
        """A worker's next link, on which it has opened `subject`."""
        link = await self.accept_link()
        opened = await link.hear()
        assert opened is not None
        assert isinstance(opened[1], Opening)
        assert (opened[0], opened[1].handshake.subject) == (1, "subject")
        return RawStream(link)


@asynccontextmanager
async def raw_caller() -> AsyncIterator[RawCaller]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        host, port = listener.socket.getsockname()
        yield RawCaller(listener, f"{host}:{port}")


@asynccontextmanager
async def meeting(
    port: RawCaller, call: AbstractAsyncContextManager[T]
) -> AsyncIterator[tuple[RawStream, T]]:
    """Enter a worker's call to `port`: both ends of its stream. Leaving closes the raw end, then the call."""
    accepted: list[RawStream] = []

    async def accept() -> None:
        accepted.append(await port.accept())

    async with AsyncExitStack() as stack:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            end = await stack.enter_async_context(call)
        (stream,) = accepted
        async with stream.stream:
            yield stream, end


def on_link(
    port: RawCaller, stream_type: StreamType = StreamType.RESPONSE, **changes: Any
) -> ConnectionInfo:
    """What an envelope says of a caller that takes its streams on one link."""
    return port.connection(stream_type, carrier=Carrier.MULTIPLEXED, **changes)
