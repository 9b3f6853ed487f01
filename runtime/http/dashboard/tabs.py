"""The pages that are open: each gets every snapshot as a server-sent event, unless it is behind.

A page that does not take what it is sent misses snapshots, which costs it nothing, since each one
tells everything; one that has missed too many is let go, and asks again by itself.
"""

from __future__ import annotations

from typing import Final

import trio

from ...errors import OverloadedError
from ..exchanges import Headers, HttpExchange, respond_error
from ..status import answer_error
from .files import HEADERS

TABS_MAX: Final = 64
MISSED_MAX: Final = 15
RETRY: Final = b"retry: 1000\n\n"
_STREAM_HEADERS: Final[Headers] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    *(
        (name.encode(), value.encode())
        for name, value in HEADERS.items()
        if name != "cache-control"
    ),
    (b"cache-control", b"no-store"),
    # nginx keeps a stream back otherwise.
    (b"x-accel-buffering", b"no"),
]


class _Tab:
    """One page."""

    def __init__(self, exchange: HttpExchange) -> None:
        self.over = trio.Event()
        self._exchange = exchange
        self._has_room = True
        self._missed = 0
        exchange.start(200, _STREAM_HEADERS)
        exchange.on_room(self._on_room)
        exchange.on_gone(self.over.set)
        self.send(RETRY)

    def send(self, data: bytes) -> None:
        """Send it if there is room; a page without any for long is let go."""
        if self.over.is_set():
            return
        if self._has_room:
            self._missed = 0
            self._has_room = self._exchange.write(data)
            return
        self._missed += 1
        if self._missed > MISSED_MAX:
            self.end()

    def end(self) -> None:
        """The stream is over; the page asks for another one."""
        if not (self.over.is_set() or self._exchange.is_gone):
            self._exchange.finish()
        self.over.set()

    def _on_room(self) -> None:
        self._has_room = True


class Tabs:
    """All of them, at most `TABS_MAX`."""

    def __init__(self) -> None:
        self._tabs: dict[_Tab, None] = {}
        self._came = trio.Event()
        self._last = b""

    def __len__(self) -> int:
        return len(self._tabs)

    async def serve(self, exchange: HttpExchange) -> None:
        """Tell one page what is sent from now on, until it is closed."""
        if len(self._tabs) >= TABS_MAX:
            error = OverloadedError(f"{TABS_MAX} pages are open, which is the limit")
            respond_error(exchange, answer_error(error), [])
            return
        tab = _Tab(exchange)
        if self._last:
            tab.send(self._last)
        self._tabs[tab] = None
        self._came.set()
        try:
            await tab.over.wait()
        finally:
            del self._tabs[tab]
            if not self._tabs:
                # Whoever comes later is not shown what was long ago.
                self._last = b""

    def send(self, data: bytes) -> None:
        """Send one event to all; whoever comes before the next one gets it, too."""
        self._last = data if self._tabs else b""
        for tab in list(self._tabs):
            tab.send(data)

    async def wait_any(self, timeout_s: float) -> bool:
        """Return as soon as a page is open, or after a while; whether one is."""
        if not self._tabs:
            self._came = trio.Event()
            with trio.move_on_after(timeout_s):
                await self._came.wait()
        return bool(self._tabs)
