"""One HTTP request and its answer, as the edge sees it: the same for every server.

The own server gives one for each request, without a detour; any ASGI server's is made from `scope`,
`receive` and `send` (`transports/http/asgi.py`). Reading waits, writing does not: what the client does not take yet
is kept by its connection, up to `http.backlog_bytes_max`, and sent by the connection's own task,
which cuts off a client that takes nothing for `http.write_timeout_s`.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Protocol, TypeAlias

import trio

from ..env import draw_id
from ..errors import RequestError
from ..protocol.streams.request import CONTEXT_ID_CHARS_MAX
from .bodies import Body
from .status import ErrorAnswer, MediaTypeError

Headers: TypeAlias = list[tuple[bytes, bytes]]
"""Names in lower case."""

JSON_TYPE: Final = b"application/json"
TIMEOUT_HEADER: Final = b"x-trinamo-timeout"
_TIMEOUT_MAX_S: Final = 86_400.0
_ID_HEADER: Final = b"x-request-id"
_SUFFIX_CHARS: Final = 17
_UNSAFE = re.compile(r"[^A-Za-z0-9._:\-]")
_ID_MASK: Final = (1 << 64) - 1
_ID_STEP: Final = 0x9E3779B97F4A7C15
"""Odd, so all 2^64 numbers come before one comes twice; large, so that neighbours look different."""


class ClientGoneError(Exception):
    """The client left before its request was read. Nobody is there to be answered."""


class HttpExchange(Protocol):
    """One request and its answer. Used by one task, but for `on_gone`."""

    @property
    def method(self) -> bytes:
        """Such as `POST`."""
        ...

    @property
    def path(self) -> bytes:
        """Without the query."""
        ...

    @property
    def headers(self) -> Headers:
        """Of the request, in their order."""
        ...

    @property
    def address(self) -> str:
        """The client's, or its proxy's; empty if it is not known any more."""
        ...

    async def read_body(self, body: Body, *, bytes_max: int, timeout_s: float) -> bytearray:
        """The whole body, counted in `body` as it arrives; used once.

        Raises `BodyTooLargeError` as soon as the limit is passed and `OverloadedError` as soon as
        all bodies together are too many (before reading, if the length is announced),
        `BodyTimeoutError` if it is not complete in time, `ClientGoneError`.
        """
        ...

    def on_gone(self, listener: Callable[[], None]) -> None:
        """Call `listener`, once, when the client leaves before the answer is complete.

        The last one given is called. By FIN, RST, a cut connection or a write that failed; at once if it has left already. It is
        called by the connection's reader and must not wait.
        """
        ...

    @property
    def is_gone(self) -> bool:
        """Whether the client has left, or was cut off, before it had the whole answer."""
        ...

    @property
    def status(self) -> int:
        """The answer's, 0 before there is one."""
        ...

    def start(self, status: int, headers: Headers) -> None:
        """The head of an answer whose length is not known; it goes out with the first `write`."""
        ...

    def write(self, data: bytes) -> bool:
        """Send a piece of the body; whether there is room for more.

        False from `http.backlog_bytes_max` unsent bytes on; `on_room` says when half of them are
        sent. What is written to a client that has gone is dropped, and True.
        """
        ...

    def on_room(self, listener: Callable[[], None]) -> None:
        """Call `listener` each time there is room again after a `write` that was False."""
        ...

    def finish(self, data: bytes = b"") -> None:
        """Send the last piece, and the end of the body."""
        ...

    def respond(self, status: int, body: bytes, headers: Headers) -> None:
        """Send a whole answer, with its length. `content-type` is JSON unless given."""
        ...

    async def sent(self) -> None:
        """Return once all that was written is the kernel's, or the client is gone. Safe to cancel."""
        ...


Handler: TypeAlias = Callable[[HttpExchange], Awaitable[None]]
"""Reads the body and answers exactly once. It may return before all is sent, and raises only what is
our own bug."""


def find_header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first header called `name` (lower case), or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


def find_deadline(headers: Headers, answer_timeout_s: float | None) -> float:
    """When a request that arrives now must be over, on trio's clock; infinite if nobody says.

    The client's `X-Trinamo-Timeout`, in seconds, can only shorten `answer_timeout_s`
    (`http.answer_timeout_s`). Raises `RequestError` if it is no time of at most a day.
    """
    given = find_header(headers, TIMEOUT_HEADER)
    if given is None and answer_timeout_s is None:
        return math.inf
    timeout_s = answer_timeout_s or math.inf
    if given is not None:
        try:
            wanted_s = float(given)
        except ValueError:
            wanted_s = math.nan
        # Written so that a NaN is refused too.
        if not 0 < wanted_s <= _TIMEOUT_MAX_S:
            raise RequestError(
                f"X-Trinamo-Timeout is {given[:40].decode('latin-1')!r}; it must be a number of"
                f" seconds above 0 and at most {_TIMEOUT_MAX_S:.0f}"
            )
        timeout_s = min(wanted_s, timeout_s)
    return trio.current_time() + timeout_s


def check_json(headers: Headers) -> None:
    """Raise `MediaTypeError` unless the body says that it is JSON.

    A page of another origin may send plain text without asking, and a body without a type; JSON it
    may not, and our answer to the question (a preflight) is no, but to `http.cors_origins`.
    """
    given = find_header(headers, b"content-type") or b""
    if given == JSON_TYPE:
        return
    given = given.partition(b";")[0].strip().lower()
    if given != JSON_TYPE:
        said = given[:80].decode("latin-1") or "missing"
        raise MediaTypeError(f"the content-type is {said}; it must be application/json")


def respond_error(exchange: HttpExchange, answer: ErrorAnswer, headers: Headers) -> None:
    """Send an error as the whole answer, with its status."""
    exchange.respond(answer.status, answer.to_body(), headers + answer.headers)


class RequestIds:
    """The ids of one service's requests, without a throw of the dice for each.

    They begin at a random place, so those of several frontends do not meet.
    """

    def __init__(self, rng: random.Random, headers: Iterable[str] = ("x-request-id",)) -> None:
        self._headers = [name.lower().encode() for name in headers]
        self._echoed = [name for name in self._headers if name != _ID_HEADER]
        self._prefix = draw_id(rng)
        self._number = rng.getrandbits(64)

    def make(self, headers: Headers) -> tuple[str, str]:
        """A request's id as the client knows it, and its id inside the cluster.

        The client's is that of the first of the headers which hold one, without characters unsafe in
        headers and logs, or a new one. Inside, ids are unique even if a client repeats its own: a
        worker remembers cancelled ids for a while, and a repeated id would be cancelled with the first.
        """
        self._number = (self._number + _ID_STEP) & _ID_MASK
        suffix = f"{self._number:016x}"
        public = ""
        for name in self._headers:
            given = find_header(headers, name)
            public = "" if given is None else _UNSAFE.sub("", given.decode("latin-1"))
            if public:
                break
        else:
            public = self._prefix + suffix
            return public, public
        public = public[: CONTEXT_ID_CHARS_MAX - _SUFFIX_CHARS]
        return public, f"{public}-{suffix}"

    def answer_headers(self, headers: Headers, public_id: str) -> Headers:
        """The headers of the answer that tell the id, to a request with `headers`."""
        value = public_id.encode()
        if not self._echoed:
            return [(_ID_HEADER, value)]
        echoed = [name for name in self._echoed if find_header(headers, name) is not None]
        return [(name, value) for name in (_ID_HEADER, *echoed)]
