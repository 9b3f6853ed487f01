"""One request of HTTP/1, and its answer: an `HttpExchange`.

What this file does not do: bytes on the wire (`../output.py`), the order of requests (`connection.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from trinamo.runtime.errors import LocalProtocolError

from ..exchange import Exchange
from ..output import Output
from ..refusals import Dates
from .answers import LAST_CHUNK, encode_chunk, encode_head
from .bodies import open_body
from .heads import RequestHead

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


class Http1Exchange(Exchange):
    """See `HttpExchange`. What is written while `is_gone` is dropped."""

    def __init__(self, owner: Owner, head: RequestHead) -> None:
        super().__init__(head, owner.address)
        self.is_last = head.is_last
        self._owner, self._output = owner, owner.output
        self._reader = open_body(head)
        self._is_1_1 = head.is_1_1
        self._is_chunked = False

    @property
    def is_body_complete(self) -> bool:
        return self._reader.is_complete

    def take(self, buffer: bytearray) -> None:
        """Take from `buffer` what belongs to the body. Raises `FaultError`."""
        self._reader.read(buffer, self._body)
        self._notify()

    def _taken(self) -> None:
        self._owner.body_taken()

    def _ask_on(self) -> None:
        self._output.send(CONTINUE)

    # --- the answer ----------------------------------------------------------------------------

    def write(self, data: bytes) -> bool:
        head = b"" if self.has_begun else self._make_head(None)
        out = head + self._frame(data)
        return self.is_gone or not out or self._output.send(out)

    def finish(self, data: bytes = b"") -> None:
        if self.is_finished:
            raise LocalProtocolError("an answer ends once")
        head = b"" if self.has_begun else self._make_head(len(data))
        out = head + self._frame(data)
        self._check_end()
        if self._is_chunked:
            out += LAST_CHUNK
        self.is_finished = True
        if out and not self.is_gone:
            self._output.send(out)
        self._notify()

    def on_room(self, listener: Callable[[], None]) -> None:
        self._output.on_room(listener)

    async def sent(self) -> None:
        await self._output.wait_flushed()

    async def wait_room(self) -> None:
        await self._output.wait_room()

    def _frame(self, data: bytes) -> bytes:
        data = self._check(data)
        return encode_chunk(data) if self._is_chunked else data

    def _make_head(self, length: int | None) -> bytes:
        headers, length = self._open(length)
        more = self._owner.dates.line() + self._make_framing(length) + self._make_connection()
        head = encode_head(self.status, headers, more)
        self.has_begun = True
        return head

    def _make_framing(self, length: int | None) -> bytes:
        self._is_chunked = False
        if length is not None:
            return b"content-length: %d\r\n" % length
        if self._is_mute and self.method != b"HEAD":
            return b""
        if self._is_1_1:
            self._is_chunked = not self._is_mute
            return b"transfer-encoding: chunked\r\n"
        self.is_last = True
        return b""

    def _make_connection(self) -> bytes:
        # A client that keeps its connections would send its next request into the close.
        self.is_last |= self._owner.is_closing or not self._reader.is_complete
        if self.is_last:
            return b"connection: close\r\n"
        return b"" if self._is_1_1 else b"connection: keep-alive\r\n"
