"""The bytes of an answer: its head, and how its body is framed. Sans-IO."""

from __future__ import annotations

import http
from typing import Final

from trinamo.runtime.errors import LocalProtocolError
from trinamo.runtime.http.exchanges import Headers

LAST_CHUNK: Final = b"0\r\n\r\n"

_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
    for status in http.HTTPStatus
}


def encode_head(status: int, headers: Headers, more: bytes) -> bytes:
    """A head with `more` lines. Raises `LocalProtocolError` for a header that would be two."""
    line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers):
        raise LocalProtocolError("a header of an answer has a line end in it")
    return b"%b%b%b\r\n" % (line, lines, more)


def encode_chunk(data: bytes) -> bytes:
    """`data` as a chunk; nothing for nothing, as an empty one would be the last."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
