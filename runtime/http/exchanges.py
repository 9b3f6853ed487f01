"""One HTTP request and its answer, as the edge sees it: the same for every server.

The own server gives one for each request, without a detour (`http1/connection.py` in
`transports/http`, `carried.py` for HTTP/2); any ASGI server's is made from `scope`, `receive` and
`send` (`asgi.py`). Reading waits, writing does not: what the client does not take yet is kept by
its connection, up to `http.backlog_bytes_max`, and sent by the connection's own task, which cuts
off a client that takes nothing for `http.write_timeout_s`.
"""

from __future__ import annotations

import abc
import math
import random
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Protocol, TypeAlias

import trio

from ..env import draw_id
from ..errors import LocalProtocolError, RequestError
from ..protocol.openai.answers import encode_data
from ..protocol.streams.request import CONTEXT_ID_CHARS_MAX
from ..sinks import Changes
from .bodies import Arrival, Body, check_length, find_decoder
from .status import ErrorAnswer, MediaTypeError

Headers: TypeAlias = list[tuple[bytes, bytes]]
"""Names in lower case."""

JSON_TYPE: Final = b"application/json"
TIMEOUT_HEADER: Final = b"x-trinamo-timeout"
_TIMEOUT_MAX_S: Final = 86_400.0
_ID_HEADER: Final = b"x-request-id"
_SUFFIX_CHARS: Final = 21
"""A dash, sixteen digits, and the number of a choice (`choices.py`)."""
_OF_ONE_HOP: Final = frozenset(
    (b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade", b"date")
)
"""What a server says itself, or what has no place in HTTP/2 (RFC 9113, section 8.2.2)."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._:\-]")
_ID_MASK: Final = (1 << 64) - 1
_ID_STEP: Final = 0x9E3779B97F4A7C15
"""Odd, so all 2^64 numbers come before one comes twice; large, so that neighbours look different."""


class ClientGoneError(Exception):
    """The client left before its request was read. Nobody is there to be answered."""


class Head(Protocol):
    """The head of a request."""

    method: bytes
    path: bytes
    query: bytes
    headers: Headers
    host: bytes | None
    length: int
    """The body's, as announced; 0 if it was not."""
    expects_continue: bool
    version: str
    """Such as `1.1`."""


class HttpExchange(abc.ABC):
    """One request and its answer. Read by one task; written by it, or by whoever has the answer's next piece.

    What framing has in common; a connection knows where a body ends, and how an answer is framed.
    """

    def __init__(self, head: Head, address: str) -> None:
        self.head, self.address = head, address
        """The second is the client's, or its proxy's; empty if it is not known any more."""
        self.method, self.path, self.headers = head.method, head.path, head.headers
        """Such as `POST`; without the query; of the request, in their order."""
        self.is_gone = False
        """The client has left, or was cut off, before it had the whole answer."""
        self.is_finished = False
        """The whole answer was written, if not sent."""
        self.has_begun = False
        """The head of the answer was written."""
        self.is_last = False
        """The connection ends after this answer."""
        self.status = 0
        """The answer's, 0 before there is one."""
        self._answer_headers: Headers = []
        self._is_mute = False
        """The answer has no body."""
        self._left: int | None = None
        """Of an announced length, what was not written yet."""
        self.body = bytearray()
        """What has arrived of the body, and was not taken yet."""
        self.is_body_complete = False
        """All of it has arrived."""
        self._on_gone: Callable[[], None] | None = None
        self._changed = Changes()

    # --- the request ---------------------------------------------------------------------------

    @abc.abstractmethod
    def _taken(self) -> None:
        """What has arrived of the body was taken: there is room for more."""

    @abc.abstractmethod
    def _ask_on(self) -> None:
        """Tell a client that waits for it to send the body."""

    async def read_body(
        self, body: Body, *, bytes_max: int, timeout_s: float, deadline: float = math.inf
    ) -> bytearray:
        """The whole body, decompressed, counted in `body` as it arrives; used once.

        Raises `BodyTooLargeError` as soon as the limit is passed and `OverloadedError` as soon as
        all bodies together are too many (before reading, if the length is announced), `MediaTypeError`
        if it is compressed otherwise than we know,
        `BodyTimeoutError` if it is not complete in time, `DeadlineError` at `deadline`, on trio's
        clock, `ClientGoneError`.
        """
        decode = find_decoder(find_header(self.headers, b"content-encoding"))
        check_length(self.head.length, bytes_max)
        body.check(self.head.length)
        data = self._take_body()
        if not self.is_body_complete:
            with Arrival(body, timeout_s, deadline):
                while not self.is_body_complete:
                    check_length(len(data) + len(self.body), bytes_max)
                    body.hold(len(data) + len(self.body))
                    await self._wait_body()
                    data += self._take_body()
        check_length(len(data), bytes_max)
        body.hold(len(data))
        if decode is not None:
            data = decode(data, bytes_max)
            body.hold(len(data))
        return data

    async def receive_body(self) -> bytes:
        """The next piece, as it arrives; what `is_body_complete` says afterwards, says it of both.

        Raises `ClientGoneError`.
        """
        if not (self.body or self.is_body_complete):
            await self._wait_body()
        return bytes(self._take_body())

    def _take_body(self) -> bytearray:
        taken, self.body = self.body, bytearray()
        self._taken()
        return taken

    async def _wait_body(self) -> None:
        if self.head.expects_continue and not self.has_begun:
            self.head.expects_continue = False
            self._ask_on()
        while not (self.body or self.is_body_complete):
            if self.is_gone:
                raise ClientGoneError
            await self._changed.wait()

    # --- the client ----------------------------------------------------------------------------

    def on_gone(self, listener: Callable[[], None]) -> None:
        """Call `listener`, once, when the client leaves before the answer is complete.

        The last one given is called. By FIN, RST, a cut connection or a write that failed; at once
        if it has left already. Whoever finds out calls it, such as the connection's reader, or a write
        that failed: it must not wait.
        """
        if self.is_gone:
            listener()
        else:
            self._on_gone = listener

    async def wait_over(self) -> None:
        """Return once the answer is complete, or the client is gone."""
        while not (self.is_finished or self.is_gone):
            await self._changed.wait()

    # --- the connection's side -----------------------------------------------------------------

    def leave(self) -> None:
        if self.is_gone:
            return
        self.is_gone = True
        listener, self._on_gone = self._on_gone, None
        if listener is not None:
            listener()
        self._changed.notify()

    def release(self) -> None:
        """Whoever answers is done, and told nothing more: the two would keep each other alive."""
        self._on_gone = None

    # --- the answer ----------------------------------------------------------------------------

    def start(self, status: int, headers: Headers) -> None:
        """The head of an answer whose length is not known; it goes out with the first `write`."""
        if self.status:
            raise LocalProtocolError("an answer begins once")
        self.status, self._answer_headers = status, headers

    @abc.abstractmethod
    def write(self, data: bytes) -> bool:
        """Send a piece of the body; whether there is room for more.

        False from `http.backlog_bytes_max` unsent bytes on; `on_room` says when half of them are
        sent. What is written to a client that has gone is dropped, and True.
        """

    @abc.abstractmethod
    def finish(self, data: bytes = b"") -> None:
        """Send the last piece, and the end of the body.

        Raises `LocalProtocolError` if more or less was written than announced.
        """

    def respond(self, status: int, body: bytes, headers: Headers) -> None:
        """Send a whole answer, with its length. `content-type` is JSON unless given."""
        if find_header(headers, b"content-type") is None:
            headers = [(b"content-type", JSON_TYPE), *headers]
        # A head that was not sent yet is replaced: something failed since.
        self.status, self._answer_headers = status, headers
        self.finish(body)

    def check_finished(self) -> None:
        """Raise `LocalProtocolError` if whoever answers has left before the end."""
        if not (self.is_finished or self.is_gone):
            raise LocalProtocolError("an application left before its answer was complete")

    @abc.abstractmethod
    def on_room(self, listener: Callable[[], None]) -> None:
        """Call `listener` each time there is room again after a `write` that was False."""

    @abc.abstractmethod
    async def sent(self) -> None:
        """Return once all that was written is the kernel's, or the client is gone. Safe to cancel."""

    @abc.abstractmethod
    async def wait_room(self) -> None:
        """Return once there is room for more, or the client is gone."""

    def _open(self, length: int | None) -> tuple[Headers, int | None]:
        """What the head of an answer of `length` says, unless its headers say one; None: not known."""
        if not self.status:
            raise LocalProtocolError("an answer begins with its status")
        headers: Headers = []
        for name, value in self._answer_headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                self.is_last |= value.lower() == b"close"
            elif name not in _OF_ONE_HOP:
                headers.append((name, value))
        # RFC 9112, section 6.3. An answer to HEAD says how long that to GET were.
        self._is_mute = self.method == b"HEAD" or self.status < 200 or self.status in (204, 304)
        self._left = None if self._is_mute else length
        return headers, None if self._is_mute and self.method != b"HEAD" else length

    def _check(self, data: bytes, *, is_last: bool = False) -> bytes:
        """`data`, as far as it belongs to the body; before the last is written, and behind `_open`."""
        if self.is_finished:
            raise LocalProtocolError("nothing follows the end of an answer")
        if self._left is not None:
            if len(data) > self._left:
                raise LocalProtocolError("more was written than the announced length")
            self._left -= len(data)
            if is_last and self._left:
                raise LocalProtocolError(f"{self._left} bytes of the announced length are missing")
        return b"" if self._is_mute else data


Handler: TypeAlias = Callable[[HttpExchange], Awaitable[None]]
"""Reads the body and answers exactly once. It may return before all is sent, and raises only what
is our own bug."""


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
    """Answer with an error: as an event, if a comment has sent the status."""
    if exchange.has_begun:
        exchange.finish(encode_data(answer.to_body(), answer.dialect.error_event))
        return
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

        The client's is that of the first of the headers which hold one, without characters unsafe
        in headers and logs, or a new one. Inside, ids are unique even if a client repeats its own:
        a worker remembers cancelled ids for a while, and a repeated id would be cancelled with the
        first.
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
