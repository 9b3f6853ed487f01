"""Server-sent events as bytes: cut out of what is received, however that is cut. Sans-IO.

A token's event is taken as it came: nothing of it is decoded. `protocol/openai/answers.py` writes them.
"""

from __future__ import annotations

from typing import Final

import attrs

from trinamo.runtime.errors import RemoteProtocolError

_BOM = b"\xef\xbb\xbf"
_ENDINGS: Final = (b"\n\n", b"\n\r", b"\r\r")
"""One of these is in any two ends of lines that follow each other."""
_ENDING_BYTES: Final = 2
_LF = 10


@attrs.define
class Received:
    """One event. `data` is without its field's name; several lines of it are joined by LF."""

    data: bytes
    event: bytes = b""

    def to_bytes(self) -> bytes:
        """The event as it is written on, with LF and without comments."""
        if not self.event and b"\n" not in self.data:
            return b"data: " + self.data + b"\n\n"
        name = b"event: " + self.event + b"\n" if self.event else b""
        return name + b"data: " + self.data.replace(b"\n", b"\ndata: ") + b"\n\n"


class EventSplitter:
    """Bytes in, events out. Ids, retry times and events without data are read over; of comments `has_comment` tells.

    At most `bytes_max` bytes are kept for an unfinished event; more raises `RemoteProtocolError`.
    """

    __slots__ = ("_bytes_max", "_is_first", "_kept", "_kept_bytes", "has_comment")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._is_first = True
        self.has_comment = False
        """One has come since this was unset."""

    def single(self, data: bytes) -> bytes | None:
        """The data of the one plain event that `data` is, as most reads bring it; None for all else."""
        if self._kept or self._is_first or b"\r" in data:
            return None
        if data.startswith(b"data: ") and data.find(b"\n") == len(data) - 2 and data[-1] == _LF:
            return data[6:-2].strip() or None
        return None

    def feed(self, data: bytes) -> list[Received]:
        if self._kept:
            if not data:
                return []
            near = self._kept[-1][-_ENDING_BYTES:] + data
            self._keep(data)
            # The bytes are looked through once an event, not once a line.
            if not any(ending in near for ending in _ENDINGS):
                return []
            data = b"".join(self._kept)
            self._kept.clear()
            self._kept_bytes = 0
        blocks, rest = _blocks(data)
        if rest:
            self._keep(rest)
        return self._events(blocks)

    def finish(self) -> list[Received]:
        """The bytes have ended: what is kept is an event without its empty line."""
        rest = b"".join(self._kept)
        self._kept.clear()
        self._kept_bytes = 0
        blocks, last = _blocks(rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))
        return self._events([*blocks, last])

    def _keep(self, data: bytes) -> None:
        self._kept.append(data)
        self._kept_bytes += len(data)
        if self._kept_bytes > self._bytes_max:
            raise RemoteProtocolError(
                f"the server sends an event of more than {self._bytes_max} bytes"
            )

    def _events(self, blocks: list[bytes]) -> list[Received]:
        found = []
        for block in blocks:
            if self._is_first:
                self._is_first = False
                block = block.removeprefix(_BOM)  # noqa: PLW2901 -- of the very first alone
            is_plain = block.startswith(b"data: ") and b"\n" not in block
            event = Received(block[6:]) if is_plain else _parse(block)
            # Gateways send events with empty data, which say nothing, to keep connections open.
            if event.data.strip():
                found.append(event)
            elif block.startswith(b":"):
                self.has_comment = True
        return found


def _blocks(data: bytes) -> tuple[list[bytes], bytes]:
    """What stands between empty lines, and the rest behind the last of them."""
    held = b""
    if b"\r" in data:
        if data.endswith(b"\r"):
            # An LF may follow, and belong to it.
            data, held = data[:-1], b"\r"
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    blocks = data.split(b"\n\n")
    return blocks, blocks.pop() + held


def _parse(block: bytes) -> Received:
    data, event = [], b""
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            event = value
        elif field == b"error" and value.startswith(b"{"):
            # llama.cpp's server has told of errors by a field of their own.
            data.append(b'{"error":' + value + b"}")
    return Received(b"\n".join(data), event)
