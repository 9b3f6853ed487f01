"""One HTTP response, from bytes as they come to status, headers and pieces of the body. Sans-IO."""

from __future__ import annotations

from typing import Final

import httptools

from ...errors import DisconnectedError, RemoteProtocolError

_HEAD_BYTES_MAX: Final = 1 << 16


class Response:
    """Feed it what is received; it gives back what of it is body.

    Its head is bounded here; how much of a body is kept, its reader bounds.
    """

    __slots__ = (
        "_head_bytes",
        "_is_framed",
        "_parser",
        "_pieces",
        "headers",
        "is_complete",
        "is_head_complete",
        "is_reusable",
        "status",
    )

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._head_bytes = 0
        self._is_framed = False
        self.headers: dict[bytes, bytes] = {}
        """Names in lower case; of a repeated one the last."""
        self.status = 0
        self.is_head_complete = self.is_complete = False
        self.is_reusable = False
        """Whether the connection may take another request."""

    def feed(self, data: bytes) -> bytes:
        """The part of the body in `data`; `RemoteProtocolError` for what is no HTTP."""
        if not self.is_head_complete:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise RemoteProtocolError(f"the upstream's answer is no HTTP: {error}") from error
        if not self.is_head_complete and self._head_bytes > _HEAD_BYTES_MAX:
            raise RemoteProtocolError("the head of the upstream's answer is too long")
        pieces = self._pieces
        if not pieces:
            return b""
        self._pieces = []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def end(self) -> None:
        """The connection has ended; `DisconnectedError` if the response had not."""
        if self.is_head_complete and not self._is_framed:
            self.is_complete = True
        if not self.is_complete:
            raise DisconnectedError(
                "the upstream closed the connection in the middle of its answer"
            )

    def cut(self) -> None:
        """The connection has ended; whether the answer is whole, its own end says better."""
        self.is_complete, self.is_reusable = True, False

    # --- called by httptools ---

    def on_header(self, name: bytes, value: bytes) -> None:
        """One field of the head, or behind the last chunk, where it says nothing."""
        if not self.is_head_complete:
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """The head is over; one that announces another is passed over."""
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers.clear()
            return
        self.is_head_complete = True
        self._is_framed = (
            b"content-length" in self.headers
            or b"chunked" in self.headers.get(b"transfer-encoding", b"").lower()
            or self.status in (204, 304)
        )

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        """The response is over, unless it was an interim one."""
        self.is_complete = self.is_head_complete
        # Only here does the parser know it.
        self.is_reusable = self.is_complete and bool(self._parser.should_keep_alive())
