"""Two-part frames: `header_len u32 BE | data_len u32 BE | header | data`, and back.

The decoder is incremental (any split of the bytes gives the same frames) and bounded (a length
over its bound is refused before a byte is stored for it). Peer bytes raise nothing but
`RemoteProtocolError`. What the parts mean is up to `response_stream.py`, `request_stream.py` and
`request.py`.
"""

from __future__ import annotations

import struct
from typing import Final

from ...errors import LocalProtocolError, RemoteProtocolError

HEADER_BYTES_MAX: Final = 128 * 1024
DATA_BYTES_MAX: Final = 32 * 1024 * 1024
_PREFIX: Final = struct.Struct(">II")
PREFIX_BYTES: Final = _PREFIX.size

Frame = tuple[bytes, bytes]
"""`(header, data)`; either may be empty, and a frame of two empty parts means nothing."""

_unpack = _PREFIX.unpack_from
_pack = _PREFIX.pack
_U32_MAX: Final = 0xFFFFFFFF


def encode_frame(header: bytes, data: bytes = b"") -> bytes:
    """The bytes of one frame. A part of 4 GiB or more is our bug: `LocalProtocolError`."""
    if len(header) > _U32_MAX or len(data) > _U32_MAX:
        raise LocalProtocolError(f"frame parts of {len(header)} and {len(data)} bytes")
    return _pack(len(header), len(data)) + header + data


def decode_frame(message: bytes) -> Frame:
    """The one frame that fills `message` exactly, as brokers deliver it."""
    decoder = FrameDecoder(header_bytes_max=HEADER_BYTES_MAX, data_bytes_max=DATA_BYTES_MAX)
    frames = decoder.feed(message)
    decoder.check()
    if len(frames) != 1 or decoder.pending_bytes:
        raise RemoteProtocolError(
            f"a message of {len(message)} bytes is not one frame: "
            f"{len(frames)} frames and {decoder.pending_bytes} bytes left over"
        )
    return frames[0]


class FrameDecoder:
    """Turns the bytes of one connection into frames.

    After a malformed frame the decoder stays broken: `feed` returns the good frames before it,
    `check` and every later `feed` raise.
    """

    __slots__ = ("_error", "_need", "_partial", "data_bytes_max", "header_bytes_max")

    def __init__(
        self, *, header_bytes_max: int = HEADER_BYTES_MAX, data_bytes_max: int = DATA_BYTES_MAX
    ) -> None:
        self.header_bytes_max = header_bytes_max
        self.data_bytes_max = data_bytes_max
        # One buffer, not a list of pieces: a peer that sends byte by byte would make every byte cost
        # an object, and the bound on a frame would no longer bound the memory.
        self._partial = bytearray()
        self._need = PREFIX_BYTES
        self._error: RemoteProtocolError | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that is not complete yet; not zero at EOF means it was truncated."""
        return len(self._partial)

    def check(self) -> None:
        """Raise the `RemoteProtocolError` that ended decoding, if there is one."""
        if self._error is not None:
            raise self._error

    def feed(self, data: bytes) -> list[Frame]:
        """Take received bytes and return the frames they complete, in order.

        Raises `RemoteProtocolError` if a malformed frame comes before any good one; after good
        ones call `check`.
        """
        self.check()
        if self._partial:
            self._partial += data
            if len(self._partial) < self._need:
                return []
            data = bytes(self._partial)
            self._partial.clear()
        frames: list[Frame] = []
        position, end = 0, len(data)
        need = PREFIX_BYTES
        while end - position >= PREFIX_BYTES:
            header_bytes, data_bytes = _unpack(data, position)
            if header_bytes > self.header_bytes_max or data_bytes > self.data_bytes_max:
                self._error = RemoteProtocolError(
                    f"frame announces a header of {header_bytes} and data of {data_bytes} bytes; "
                    f"at most {self.header_bytes_max} and {self.data_bytes_max} are taken"
                )
                if not frames:
                    raise self._error
                return frames
            need = PREFIX_BYTES + header_bytes + data_bytes
            if end - position < need:
                break
            middle = position + PREFIX_BYTES + header_bytes
            frames.append((data[position + PREFIX_BYTES : middle], data[middle : position + need]))
            position += need
            need = PREFIX_BYTES
        self._need = need
        self._partial += data[position:]
        return frames
