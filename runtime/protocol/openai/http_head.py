"""What a request's head may look like on the wire, more strictly than parsers read it. Sans-IO.

A parser that is kind to a bare LF, a folded line or two lengths reads another request than a proxy
in front of it may have, and that is how requests are smuggled (RFC 9112, sections 2.2, 5.2, 6.1
and 11.2). What this module does not do: parse (llhttp does), and answer (`transports/http/server.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import attrs

PREFACE_START: Final = b"PRI * HTTP/"
"""How a client opens HTTP/2 that was not agreed upon (RFC 9113, section 3.4)."""
HOST_VALUE: Final = re.compile(rb"[A-Za-z0-9\-._~!$&'()*+,;=%\[\]:]*")
"""What a Host header may hold: one authority (RFC 3986, section 3.2)."""
VERSIONS: Final = (b"1.0", b"1.1")
HEADERS_MAX: Final = 100
"""Of one request, whichever version of HTTP it speaks."""


@attrs.frozen
class HeadFault:
    """Why a head is refused, and the HTTP status that says so."""

    status: int
    reason: str


OTHER_VERSION: Final = HeadFault(
    505, "HTTP/2 and others are not supported here; use HTTP/1.1, or a proxy that does"
)
BARE_LF: Final = HeadFault(400, "a line of the head ends with LF alone; it must be CR LF")
FOLDED: Final = HeadFault(400, "a header is folded over two lines, which is obsolete")
TWO_LENGTHS: Final = HeadFault(
    400, "the body's length is given twice: by content-length and by transfer-encoding"
)
TOO_MANY: Final = HeadFault(431, f"there are more than {HEADERS_MAX} headers, which is the limit")
CHUNKS_IN_1_0: Final = HeadFault(400, "HTTP/1.0 knows no transfer-encoding")


def find_fault_in_bytes(data: bytes) -> HeadFault | None:
    """What is wrong with the bytes of a head, complete or not, that starts at `data[0]`.

    What follows the head is not looked at.
    """
    if data.startswith(PREFACE_START):
        return OTHER_VERSION
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[: end + 2]
    lines = head.count(b"\n")
    if lines > HEADERS_MAX + 1:
        # Before any of them is parsed.
        return TOO_MANY
    if lines != head.count(b"\r\n"):
        return BARE_LF
    if b"\n " in head or b"\n\t" in head:
        return FOLDED
    return None


def find_fault_in_fields(version: bytes, fields: Iterable[tuple[bytes, bytes]]) -> HeadFault | None:
    """What is wrong with a parsed head, given its version and its fields in lower case."""
    if version not in VERSIONS:
        return OTHER_VERSION
    names = {name for name, _ in fields}
    if b"transfer-encoding" not in names:
        return None
    if b"content-length" in names:
        return TWO_LENGTHS
    # RFC 9112, section 6.1: such framing is faulty even if the length is right.
    return CHUNKS_IN_1_0 if version == b"1.0" else None
