"""Ends of links that take no part in the state machines: they say whatever a test wants."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from tests.transports.tcp.ends import RawCaller, RawEnd, accept_member, raw_caller, raw_member
from trinamo.runtime.protocol.streams.control import Control, Handshake
from trinamo.runtime.protocol.streams.link_frames import (
    Opening,
    encode_event,
    encode_item,
    encode_opening,
)
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.runtime.protocol.streams.multiplex import Arrival, Demultiplexer, StreamIds
from trinamo.runtime.protocol.streams.request import Carrier, ConnectionInfo, StreamType

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


@asynccontextmanager
async def worker_link(address: str) -> AsyncIterator[RawLink]:
    """A worker's end that has greeted the caller at `address`."""
    async with raw_member(address, Purpose.STREAMS) as end:
        yield RawLink(end)


@asynccontextmanager
async def caller_port() -> AsyncIterator[RawCaller]:
    """Where workers call home, with nothing behind it."""
    async with raw_caller() as port:
        yield port


async def accept_link(port: RawCaller) -> RawLink:
    """A worker's next link, greeted."""
    return RawLink(await accept_member(port.listener, purpose=Purpose.STREAMS))


def on_link(
    port: RawCaller,
    stream_type: StreamType = StreamType.RESPONSE,
    subject: str = "subject",
    window_bytes: int = WINDOW,
) -> ConnectionInfo:
    """What an envelope says of a caller that takes its streams on a link."""
    return ConnectionInfo(port.address, subject, stream_type, Carrier.MULTIPLEXED, window_bytes)
