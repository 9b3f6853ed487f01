"""The page: its files, served as they are, and those who have it open, who are told each snapshot.

A page may run our own scripts alone and talk to us alone (`POLICY`): what a model or a worker calls
itself can be no code, whatever a mistake in the page makes of it. One that does not take what it is
sent misses snapshots, which costs it nothing, since each one tells everything; one that has missed
too many is let go, and asks again by itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import trio
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from ..errors import OverloadedError
from ..http.exchanges import Headers, HttpExchange, respond_error
from ..http.status import PathNotFoundError, answer_error

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    # A frontend of another version may answer tomorrow.
    "cache-control": "no-cache",
}
_FOLDER: Final = Path(__file__).with_name("files")
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
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


def file_routes(prefix: str) -> list[Route]:
    """`prefix` for the page, `prefix/NAME` for what it loads; blocks on the disk, so call it early."""

    async def to_page(request: Request) -> Response:
        """A browser that is given no path means the page; a program has mistaken the address."""
        if "text/html" not in request.headers.get("accept", ""):
            raise PathNotFoundError("there is nothing at /")
        return RedirectResponse(prefix)

    routes = [Route("/", to_page)]
    for path in sorted(_FOLDER.iterdir()):
        if path.suffix in _TYPES:
            is_page = path.name == "index.html"
            where = prefix if is_page else f"{prefix}/{path.name}"
            routes.append(Route(where, _answer(path.read_bytes(), _TYPES[path.suffix])))
    return routes


def _answer(data: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_: Request) -> Response:
        return Response(data, media_type=media_type, headers=HEADERS)

    return answer


class _Tab:
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
