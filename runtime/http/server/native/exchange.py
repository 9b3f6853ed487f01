"""One request on a connection of ours, and its answer: an `HttpExchange`.

What this file does not do: bytes on the wire (`output.py`), the order of requests (`connection.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import trio

from ....errors import LocalProtocolError
from ...bodies import Body, check_length
from ...exchanges import JSON_TYPE, ClientGoneError, Headers
from ..refusals import Dates
from .answers import LAST_CHUNK, encode_chunk, encode_head, has_body
from .bodies import open_body
from .heads import RequestHead
from .output import Output

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class Owner(Protocol):
    """What an exchange knows of its connection."""

    output: Output
    dates: Dates
    is_closing: bool
    """No request follows this one."""
    address: str
    """The peer's."""

    def body_taken(self) -> None:
        """What has arrived of the body was taken, so there is room for more."""
        ...


class NativeExchange:
    """See `HttpExchange`. What is written while `is_gone` is dropped."""

    def __init__(self, owner: Owner, head: RequestHead) -> None:
        self.head = head
        self.method, self.path, self.headers = head.method, head.path, head.headers
        self.is_gone = False
        self.is_finished = False
        """The whole answer was written, if not sent."""
        self.is_last = head.is_last
        """The connection ends after this answer."""
        self._owner, self._output = owner, owner.output
        self._reader = open_body(head)
        self._body = bytearray()
        self._on_gone: Callable[[], None] | None = None
        self._changed: trio.Event | None = None
        self.status = 0
        """The answer's, 0 before there is one."""
        self._answer_headers: Headers = []
        self._has_begun = False
        self._is_mute = self._is_chunked = False
        self._left: int | None = None
        """Of an announced length, what was not written yet."""

    # --- the request ---------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """See `HttpExchange`."""
        return self._owner.address

    @property
    def is_body_complete(self) -> bool:
        """Whether all of it has arrived."""
        return self._reader.is_complete

    @property
    def body_bytes(self) -> int:
        """How much of the body has arrived, and was not taken yet."""
        return len(self._body)

    async def read_body(self, body: Body, *, bytes_max: int, timeout_s: float) -> bytearray:
        """See `HttpExchange`."""
        check_length(self.head.length, bytes_max)
        body.check(self.head.length)
        data = self._take_body()
        if not self._reader.is_complete:
            with body.arriving(timeout_s):
                while not self._reader.is_complete:
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
        if not (self._body or self._reader.is_complete):
            await self._wait_body()
        return bytes(self._take_body())

    def _take_body(self) -> bytearray:
        taken, self._body = self._body, bytearray()
        self._owner.body_taken()
        return taken

    async def _wait_body(self) -> None:
        if self.head.expects_continue and not self._has_begun:
            self.head.expects_continue = False
            self._output.send(CONTINUE)
        while not (self._body or self._reader.is_complete):
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

    def take(self, buffer: bytearray) -> None:
        """Take from `buffer` what belongs to the body. Raises `FaultError`."""
        self._reader.read(buffer, self._body)
        self._notify()

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

    @property
    def has_begun(self) -> bool:
        """Whether the head of the answer was sent."""
        return self._has_begun

    def start(self, status: int, headers: Headers) -> None:
        """See `HttpExchange`."""
        if self.status:
            raise LocalProtocolError("an answer begins once")
        self.status, self._answer_headers = status, headers

    def write(self, data: bytes) -> bool:
        """See `HttpExchange`."""
        head = b"" if self._has_begun else self._make_head(None)
        out = head + self._frame(data)
        return self.is_gone or not out or self._output.send(out)

    def finish(self, data: bytes = b"") -> None:
        """See `HttpExchange`. `LocalProtocolError` if more or less was written than announced."""
        if self.is_finished:
            raise LocalProtocolError("an answer ends once")
        head = b"" if self._has_begun else self._make_head(len(data))
        out = head + self._frame(data)
        if self._left:
            raise LocalProtocolError(f"{self._left} bytes of the announced length are missing")
        if self._is_chunked:
            out += LAST_CHUNK
        self.is_finished = True
        if out and not self.is_gone:
            self._output.send(out)
        self._notify()

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

    def on_room(self, listener: Callable[[], None]) -> None:
        """See `HttpExchange`."""
        self._output.on_room(listener)

    async def sent(self) -> None:
        """See `HttpExchange`."""
        await self._output.wait_flushed()

    async def wait_room(self) -> None:
        """Return once there is room for more, or the client is gone."""
        await self._output.wait_room()

    def _frame(self, data: bytes) -> bytes:
        if self.is_finished:
            raise LocalProtocolError("nothing follows the end of an answer")
        if self._left is not None:
            if len(data) > self._left:
                raise LocalProtocolError("more was written than the announced length")
            self._left -= len(data)
        if self._is_mute:
            return b""
        return encode_chunk(data) if self._is_chunked else data

    def _make_head(self, length: int | None) -> bytes:
        """The head of an answer of `length`, unless its headers say one; None: not known."""
        if not self.status:
            raise LocalProtocolError("an answer begins with its status")
        headers: Headers = []
        for name, value in self._answer_headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                self.is_last |= value.lower() == b"close"
            elif name not in (b"transfer-encoding", b"date"):
                headers.append((name, value))
        more = self._owner.dates.line() + self._make_framing(self.status, length)
        head = encode_head(self.status, headers, more + self._make_connection())
        self._has_begun = True
        return head

    def _make_framing(self, status: int, length: int | None) -> bytes:
        self._is_mute = not has_body(self.method, status)
        if self._is_mute and self.method != b"HEAD":
            return b""
        if length is not None:
            # An answer to HEAD says how long that to GET were, and has no body all the same.
            self._left = None if self._is_mute else length
            return b"content-length: %d\r\n" % length
        if self.head.is_1_1:
            self._is_chunked = not self._is_mute
            return b"transfer-encoding: chunked\r\n"
        self.is_last = True
        return b""

    def _make_connection(self) -> bytes:
        # A client that keeps its connections would send its next request into the close.
        self.is_last |= self._owner.is_closing or not self._reader.is_complete
        if self.is_last:
            return b"connection: close\r\n"
        return b"" if self.head.is_1_1 else b"connection: keep-alive\r\n"
