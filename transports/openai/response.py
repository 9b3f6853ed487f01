"""One HTTP response, from bytes as they come to status, headers and pieces of the body. Sans-IO."""

from __future__ import annotations

from typing import Final

import attrs
import httptools

from trinamo.runtime.errors import DisconnectedError, RemoteProtocolError

_HEAD_BYTES_MAX: Final = 1 << 16


@attrs.define(eq=False)
class Response:
    """Feed it what is received; it gives back what of it is body.

    Its head is bounded here; how much of a body is kept, its reader bounds.
    """

    headers: dict[bytes, bytes] = attrs.field(factory=dict)
    """Names in lower case; of a repeated one the last."""
    status: int = 0
    is_head_complete: bool = False
    is_complete: bool = False
    is_reusable: bool = False
    """Whether the connection may take another request."""
    _parser: httptools.HttpResponseParser = attrs.field(
        default=attrs.Factory(httptools.HttpResponseParser, takes_self=True)
    )
    _pieces: list[bytes] = attrs.field(factory=list)
    _head_bytes: int = 0
    _is_framed: bool = False

    def feed(self, data: bytes) -> bytes:
        """The part of the body in `data`; `RemoteProtocolError` for what is no HTTP."""
        if not self.is_head_complete:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise RemoteProtocolError(f"the upstream's answer is no HTTP: {error}") from error
        except httptools.HttpParserUpgrade as error:
            raise RemoteProtocolError("the upstream wants another protocol than HTTP") from error
        if not self.is_head_complete and self._head_bytes > _HEAD_BYTES_MAX:
            raise RemoteProtocolError("the head of the upstream's answer is too long")
        pieces = self._pieces
        if not pieces:
            return b""
        self._pieces = []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def end(self) -> bytes:
        """The connection has ended, and brings nothing; `DisconnectedError` if the response had not."""
        if self.is_head_complete and not self._is_framed:
            self.is_complete = True
        if not self.is_complete:
            raise DisconnectedError(
                "the upstream closed the connection in the middle of its answer"
            )
        return b""

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
