"""Comments in streams that are silent: to proxies and clients they say that the connection is alive.

Many proxies cut a connection over which nothing has come for a minute, and a long prompt, or a queue, takes longer.
An event stream may hold comments, which clients read over. The first of them sends the status of the answer, so
what fails behind it is told as an event. Answers that are not streamed have none.
"""

from __future__ import annotations

import math
from typing import Final, Self

import attrs
import trio

from ..protocol.openai.passing import COMMENT
from .exchanges import Headers, HttpExchange

EVENT_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_LOOKS: Final = 4
"""In one interval, at all streams together: one that is written to is not woken for it."""


@attrs.define(eq=False)
class EventStream:
    """One answer in events, from its request's arrival on: a context manager."""

    _streams: dict[EventStream, None]
    _exchange: HttpExchange
    _headers: Headers
    """They are read with the answer's first byte."""
    _silent_looks: int = 0

    def __enter__(self) -> Self:
        self._streams[self] = None
        return self

    def __exit__(self, *_: object) -> None:
        del self._streams[self]

    def written(self) -> None:
        """Something else was sent."""
        self._silent_looks = 0

    def look(self) -> None:
        """Write a comment if nothing was sent since so many looks. Does not wait."""
        self._silent_looks += 1
        exchange = self._exchange
        if self._silent_looks < _LOOKS or exchange.is_gone or exchange.is_finished:
            return
        self._silent_looks = 0
        if not exchange.status:
            exchange.start(200, EVENT_HEADERS + self._headers)
        exchange.write(COMMENT)


class Comments:
    """The event streams of one service. `interval_s` of silence brings a comment; 0: none ever."""

    def __init__(self, interval_s: float) -> None:
        self._pause_s = interval_s / _LOOKS if interval_s else math.inf
        self._streams: dict[EventStream, None] = {}

    def stream(self, exchange: HttpExchange, headers: Headers) -> EventStream:
        return EventStream(self._streams, exchange, headers)

    async def run(self) -> None:
        """Look at all streams, until cancelled."""
        while True:
            await trio.sleep(self._pause_s)
            for stream in self._streams:
                stream.look()
