"""Where the body of a request ends: after so many bytes, or after its last chunk. Sans-IO.

Read by ourselves, because a parser that goes on to the next request does not say where it began.
"""

from __future__ import annotations

import re
from typing import Final

from ..refusals import HeadFault
from .heads import FaultError, RequestHead

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
