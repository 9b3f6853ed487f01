"""Bytes to the head of a request, and to its body, read strictly. Sans-IO.

llhttp reads the fields and refuses what is no HTTP. The rules of this file are about what it lets pass,
or hides: how long a head is, the request line, the framing of the body. A parser that is kind to a bare
LF, a folded line or two lengths reads another request than a proxy in front of it may have, and that
is how requests are smuggled (RFC 9112, sections 2.2, 5.2, 6.1 and 11.2).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import httptools

from trinamo.runtime.http.exchanges import Headers

from ..refusals import HEADERS_MAX, TOO_MANY, HeadFault

PREFACE_START: Final = b"PRI * HTTP/"
"""How a client opens HTTP/2 that was not agreed upon (RFC 9113, section 3.4)."""
HOST_VALUE: Final = re.compile(rb"[A-Za-z0-9\-._~!$&'()*+,;=%\[\]:]*")
"""What a Host header may hold: one authority (RFC 3986, section 3.2)."""
VERSIONS: Final = (b"1.0", b"1.1")
TARGET_BYTES_MAX: Final = 8192

_END: Final = b"\r\n\r\n"
_NOT_HTTP: Final = HeadFault(400, "this is no HTTP request: bad request")
_REQUEST_LINE: Final = HeadFault(
    400, "the first line must be a method, a path and a version, with one space between them"
)
_TARGET: Final = HeadFault(400, "the request's target is neither a path nor a URL of this server")
_OTHER_TARGET: Final = HeadFault(400, "the request's target and its Host header differ")
_TUNNEL: Final = HeadFault(501, "this server is no proxy: CONNECT is not implemented")
_TARGET_LENGTH: Final = HeadFault(
    414, f"the request's target is longer than {TARGET_BYTES_MAX} bytes, which is the limit"
)
_HOST: Final = HeadFault(400, "there must be one Host header, which is a name or an address")
_CODING: Final = HeadFault(501, "the only transfer-encoding that is implemented is: chunked")

OTHER_VERSION: Final = HeadFault(
    505, "HTTP/2 and others are not supported here; use HTTP/1.1, or a proxy that does"
)
BARE_LF: Final = HeadFault(400, "a line of the head ends with LF alone; it must be CR LF")
FOLDED: Final = HeadFault(400, "a header is folded over two lines, which is obsolete")
TWO_LENGTHS: Final = HeadFault(
    400, "the body's length is given twice: by content-length and by transfer-encoding"
)
CHUNKS_IN_1_0: Final = HeadFault(400, "HTTP/1.0 knows no transfer-encoding")
_ABSOLUTE: Final = re.compile(rb"https?://([^/?#]*)([^#]*)", re.IGNORECASE)
_FRAMING: Final = frozenset(
    (b"host", b"content-length", b"transfer-encoding", b"connection", b"expect")
)


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


class FaultError(Exception):
    """What a client sent is refused; the connection ends after the answer."""

    def __init__(self, fault: HeadFault) -> None:
        super().__init__(fault.reason)
        self.fault = fault


class RequestHead:
    def __init__(self, method: bytes, target: bytes, version: bytes, headers: Headers) -> None:
        self.method, self.headers = method, headers
        self.is_1_1 = version == b"1.1"
        self.version = "1.1" if self.is_1_1 else "1.0"
        self.length = 0
        self.is_chunked = self.expects_continue = False
        hosts = self._read_framing(version)
        if len(hosts) > 1 or (self.is_1_1 and not hosts):
            raise FaultError(_HOST)
        self.host = hosts[0] if hosts else None
        if self.host is not None and not HOST_VALUE.fullmatch(self.host):
            raise FaultError(_HOST)
        self.path, _, self.query = self._origin_form(target).partition(b"?")

    def _read_framing(self, version: bytes) -> list[bytes]:
        """What says where the body ends, and the connection; the names that the server is called by."""
        hosts: list[bytes] = []
        options: list[bytes] = []
        for name, value in self.headers:
            if name not in _FRAMING:
                continue
            if name == b"host":
                hosts.append(value)
            elif name == b"content-length":
                self.length = int(value)
            elif name == b"transfer-encoding":
                if self.is_chunked or value.lower() != b"chunked":
                    raise FaultError(_CODING)
                self.is_chunked = True
            elif name == b"connection":
                options += value.lower().split(b",")
            else:
                self.expects_continue = self.is_1_1 and value.lower() == b"100-continue"
        if self.is_chunked or not self.is_1_1:
            fault = find_fault_in_fields(version, self.headers)
            if fault is not None:
                raise FaultError(fault)
        told = {option.strip() for option in options}
        self.is_last = b"close" in told or not (self.is_1_1 or b"keep-alive" in told)
        return hosts

    def _origin_form(self, target: bytes) -> bytes:
        """The target as a path with its query; `*` only where a method may ask for it."""
        if target.startswith(b"/") and b"#" not in target:
            return target
        if target == b"*" and self.method == b"OPTIONS":
            return target
        if self.method == b"CONNECT":
            raise FaultError(_TUNNEL)
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is None:
            raise FaultError(_TARGET)
        if self.host is None or absolute[1].lower() != self.host.lower():
            raise FaultError(_OTHER_TARGET)
        path: bytes = absolute[2]
        return path if path.startswith(b"/") else b"/" + path


class _Fields(list[tuple[bytes, bytes]]):
    """Of one head, as they come."""

    def on_header(self, name: bytes, value: bytes) -> None:
        """What llhttp calls for each."""
        self.append((name.lower(), value.rstrip(b" \t")))


class HeadReader:
    """Takes heads off the front of a connection's buffer, one after the other."""

    __slots__ = ("_bytes_max", "_fed", "_headers", "_parser", "_too_long")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._too_long = HeadFault(
            431, f"the head is longer than http.header_bytes_max {bytes_max}"
        )
        self._fed = 0
        self._headers: _Fields
        self._parser: httptools.HttpRequestParser

    def read(self, buffer: bytearray) -> RequestHead | None:
        """Remove a head from `buffer`; None if it is not there yet, and `buffer` is left alone.

        `buffer` holds what it held at the last call, and more. Raises `FaultError`, as early as the
        fault can be seen; nothing may be read after it.
        """
        while buffer.startswith(b"\r\n") and not self._fed:
            # Some clients end a body with an empty line (RFC 9112, section 2.2).
            del buffer[:2]
        end = buffer.find(_END, max(0, self._fed - 3))
        whole = bytes(buffer if end < 0 else buffer[: end + 4])
        if whole in (b"", b"\r"):
            return None
        if len(whole) > self._bytes_max:
            raise FaultError(self._too_long)
        if (fault := find_fault_in_bytes(whole)) is not None:
            raise FaultError(fault)
        if not self._fed:
            # Not `self`, which holds the parser.
            self._headers = _Fields()
            self._parser = httptools.HttpRequestParser(self._headers)
        try:
            self._parser.feed_data(whole[self._fed :] if self._fed else whole)
        except httptools.HttpParserUpgrade:
            # An offer, which is not taken: what follows is HTTP (RFC 9110, section 7.8).
            pass
        except httptools.HttpParserError:
            raise FaultError(_NOT_HTTP) from None
        if end < 0:
            self._fed = len(whole)
            return None
        self._fed = 0
        del buffer[: end + 4]
        return self._take(whole)

    def _take(self, whole: bytes) -> RequestHead:
        parts = whole[: whole.find(b"\r\n")].split(b" ")
        if len(parts) != 3:
            raise FaultError(_REQUEST_LINE)
        method, target, version = parts
        if len(target) > TARGET_BYTES_MAX:
            raise FaultError(_TARGET_LENGTH)
        if not version.startswith(b"HTTP/") or method != self._parser.get_method():
            raise FaultError(_REQUEST_LINE)
        return RequestHead(method, target, version[5:], self._headers)


# --- where the body of a request ends: after so many bytes, or after its last chunk ---

# Read by ourselves, because a parser that goes on to the next request does not say where it began.

EXTENSION_BYTES_MAX: Final = 4096
"""Of all chunks of a body together."""
TRAILER_BYTES_MAX: Final = 8192
CHUNKS_FREE: Final = 1024
CHUNK_BYTES_MIN: Final = 16
"""Of the chunks of a body on average, from `CHUNKS_FREE` on: each costs the same work, however short."""

_LINE_BYTES_MAX: Final = 32 + EXTENSION_BYTES_MAX
_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})(;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")

_CHUNK: Final = HeadFault(400, "the body is not made of well-formed chunks")
_CRUMBS: Final = HeadFault(
    400, f"the chunks are too short: {CHUNK_BYTES_MIN} bytes on average are the least"
)
_EXTENSIONS: Final = HeadFault(
    400, f"the chunks' extensions are longer than {EXTENSION_BYTES_MAX} bytes, which is the limit"
)
_TRAILERS: Final = HeadFault(
    431, f"the trailers are longer than {TRAILER_BYTES_MAX} bytes, which is the limit"
)


class BodyReader:
    """Takes the body that follows `head` off the front of a connection's buffer.

    A length, or chunks: sizes, data and trailers. Trailers are judged, and dropped: nobody here
    reads any.
    """

    __slots__ = ("_chunks", "_extensions", "_left", "_rest", "_size", "_trailers", "is_complete")

    def __init__(self, head: RequestHead) -> None:
        self._rest = None if head.is_chunked else head.length
        """Of a body with a length; None of chunks."""
        self._left: int | None = None
        """Of the current chunk and the line end behind it; None before a size."""
        self._extensions = self._chunks = self._size = 0
        self._trailers: int | None = None
        """Bytes of trailers so far; None before the last chunk."""
        self.is_complete = self._rest == 0

    def read(self, buffer: bytearray, into: bytearray) -> None:
        """Move what is there of the body, at most to its end. Raises `FaultError`."""
        if self._rest is not None:
            self._rest -= _move(buffer, into, self._rest)
            self.is_complete = not self._rest
            return
        while not self.is_complete and self._step(buffer, into):
            pass

    def _step(self, buffer: bytearray, into: bytearray) -> bool:
        if self._trailers is not None:
            return self._read_trailer(buffer, self._trailers)
        if self._left is None:
            return self._read_size(buffer)
        self._left -= _move(buffer, into, self._left - 2)
        if self._left > 2 or len(buffer) < self._left:
            return False
        if buffer[:2] != b"\r\n":
            raise FaultError(_CHUNK)
        del buffer[:2]
        self._left = None
        return True

    def _read_size(self, buffer: bytearray) -> bool:
        line = _take_line(buffer, _LINE_BYTES_MAX, _EXTENSIONS)
        if line is None:
            return False
        found = _SIZE_LINE.fullmatch(line)
        if found is None:
            raise FaultError(_CHUNK)
        self._extensions += len(found[2] or b"")
        if self._extensions > EXTENSION_BYTES_MAX:
            raise FaultError(_EXTENSIONS)
        size = int(found[1], 16)
        if size:
            self._left = size + 2
            self._chunks += 1
            self._size += size
            if self._chunks > CHUNKS_FREE and self._size < self._chunks * CHUNK_BYTES_MIN:
                raise FaultError(_CRUMBS)
        else:
            self._trailers = 0
        return True

    def _read_trailer(self, buffer: bytearray, before: int) -> bool:
        line = _take_line(buffer, TRAILER_BYTES_MAX - before, _TRAILERS)
        if line is None:
            return False
        if not line:
            self.is_complete = True
        elif not _TRAILER.fullmatch(line):
            raise FaultError(_CHUNK)
        self._trailers = before + len(line)
        return True


def _move(buffer: bytearray, into: bytearray, bytes_max: int) -> int:
    if len(buffer) <= bytes_max:
        moved = len(buffer)
        into += buffer
        buffer.clear()
    else:
        moved = bytes_max
        into += buffer[:moved]
        del buffer[:moved]
    return moved


def _take_line(buffer: bytearray, bytes_max: int, too_long: HeadFault) -> bytes | None:
    """Remove a line; None if it is not there yet. LF alone ends none, and is a fault."""
    end = buffer.find(b"\n", 0, bytes_max + 2)
    if end < 0:
        if len(buffer) > bytes_max + 1:
            raise FaultError(too_long)
        return None
    if not end or buffer[end - 1] != 0x0D:
        raise FaultError(_CHUNK)
    line = bytes(buffer[: end - 1])
    del buffer[: end + 1]
    return line
