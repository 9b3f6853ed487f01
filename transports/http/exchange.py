"""One request on a connection of ours, and its answer: what HTTP/1 and HTTP/2 have in common.

What this file does not do: frame an answer, and know where a body ends (`http1/connection.py`,
`carried.py`).
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Final, Protocol

import trio

from trinamo.runtime.errors import LocalProtocolError
from trinamo.runtime.http.bodies import Body, check_length
from trinamo.runtime.http.exchanges import JSON_TYPE, ClientGoneError, Headers

_OF_ONE_HOP: Final = frozenset(
    (b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade", b"date")
)
"""What a server says itself, or what has no place in HTTP/2 (RFC 9113, section 8.2.2)."""


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


class Exchange(abc.ABC):
    """See `HttpExchange`. What is written while `is_gone` is dropped."""

    def __init__(self, head: Head, address: str) -> None:
        self.head, self.address = head, address
        self.method, self.path, self.headers = head.method, head.path, head.headers
        self.is_gone = False
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
        self._body = bytearray()
        self._on_gone: Callable[[], None] | None = None
        self._changed: trio.Event | None = None

    # --- the request ---------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def is_body_complete(self) -> bool:
        """Whether all of it has arrived."""

    @abc.abstractmethod
    def _taken(self) -> None:
        """What has arrived of the body was taken: there is room for more."""

    @abc.abstractmethod
    def _ask_on(self) -> None:
        """Tell a client that waits for it to send the body."""

    @property
    def body_bytes(self) -> int:
        """How much of the body has arrived, and was not taken yet."""
        return len(self._body)

    async def read_body(self, body: Body, *, bytes_max: int, timeout_s: float) -> bytearray:
        """See `HttpExchange`."""
        check_length(self.head.length, bytes_max)
        body.check(self.head.length)
        data = self._take_body()
        if not self.is_body_complete:
            with body.arriving(timeout_s):
                while not self.is_body_complete:
                    self._hold(body, len(data) + self.body_bytes, bytes_max)
                    await self._wait_body()
                    data += self._take_body()
        self._hold(body, len(data), bytes_max)
        return data

    @staticmethod
    def _hold(body: Body, size: int, bytes_max: int) -> None:
        check_length(size, bytes_max)
        body.hold(size)

    async def receive_body(self) -> bytes:
        """The next piece, as it arrives; what `is_body_complete` says afterwards, says it of both.

        Raises `ClientGoneError`.
        """
        if not (self._body or self.is_body_complete):
            await self._wait_body()
        return bytes(self._take_body())

    def _take_body(self) -> bytearray:
        taken, self._body = self._body, bytearray()
        self._taken()
        return taken

    async def _wait_body(self) -> None:
        if self.head.expects_continue and not self.has_begun:
            self.head.expects_continue = False
            self._ask_on()
        while not (self._body or self.is_body_complete):
            if self.is_gone:
                raise ClientGoneError
            await self._wait_change()

    # --- the client ----------------------------------------------------------------------------

    def on_gone(self, listener: Callable[[], None]) -> None:
        """See `HttpExchange`."""
        if self.is_gone:
            listener()
        else:
            self._on_gone = listener

    async def wait_over(self) -> None:
        """Return once the answer is complete, or the client is gone."""
        while not (self.is_finished or self.is_gone):
            await self._wait_change()

    async def _wait_change(self) -> None:
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    # --- the connection's side -----------------------------------------------------------------

    def leave(self) -> None:
        """The client is gone."""
        if self.is_gone:
            return
        self.is_gone = True
        listener, self._on_gone = self._on_gone, None
        if listener is not None:
            listener()
        self._notify()

    def release(self) -> None:
        """Whoever answers is done, and told nothing more: the two would keep each other alive."""
        self._on_gone = None

    # --- the answer ----------------------------------------------------------------------------

    def start(self, status: int, headers: Headers) -> None:
        """See `HttpExchange`."""
        if self.status:
            raise LocalProtocolError("an answer begins once")
        self.status, self._answer_headers = status, headers

    @abc.abstractmethod
    def write(self, data: bytes) -> bool:
        """See `HttpExchange`."""

    @abc.abstractmethod
    def finish(self, data: bytes = b"") -> None:
        """See `HttpExchange`. `LocalProtocolError` if more or less was written than announced."""

    def respond(self, status: int, body: bytes, headers: Headers) -> None:
        """See `HttpExchange`."""
        if not any(name == b"content-type" for name, _ in headers):
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
        """See `HttpExchange`."""

    @abc.abstractmethod
    async def sent(self) -> None:
        """See `HttpExchange`."""

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

    def _check(self, data: bytes) -> bytes:
        """`data`, as far as it belongs to the body; before the last is written, and behind `_open`."""
        if self.is_finished:
            raise LocalProtocolError("nothing follows the end of an answer")
        if self._left is not None:
            if len(data) > self._left:
                raise LocalProtocolError("more was written than the announced length")
            self._left -= len(data)
        return b"" if self._is_mute else data

    def _check_end(self) -> None:
        if self._left:
            raise LocalProtocolError(f"{self._left} bytes of the announced length are missing")
