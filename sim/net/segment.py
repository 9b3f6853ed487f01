"""What travels one way over a simulated TCP connection at once. See `connection.py`."""

from __future__ import annotations

import enum
from typing import NamedTuple
from zlib import crc32

from ..core.trace import Fields

HEADER_BYTES = 54
"""Ethernet, IPv4 and TCP, without options."""


class SegmentKind(enum.Enum):
    """What a segment says."""

    ACK = "ack"
    """The last of a handshake; those of data are not sent one by one."""
    DATA = "data"
    CREDIT = "credit"
    """The reader took bytes: the sender may send as many more."""
    FIN = "fin"
    RST = "rst"

    @property
    def is_bare(self) -> bool:
        """Whether it says nothing to a process: no row, no jitter, and its loss is no matter."""
        return self in (SegmentKind.ACK, SegmentKind.CREDIT)


class Segment(NamedTuple):
    """What travels one way at once; `size` is the bytes of `data`, or those credited."""

    kind: SegmentKind
    data: bytes
    size: int
    number: int
    sent_s: float
    """Virtual seconds when the sender let go of it."""

    @property
    def fields(self) -> Fields:
        """What a row of the trace holds of it: its bytes by a checksum."""
        return (
            ("segment", self.kind.value),
            ("number", self.number),
            ("size", self.size),
            ("sent_s", self.sent_s),
            ("crc", crc32(self.data)),
        )

    @property
    def wire_bytes(self) -> int:
        """What it takes of a link's bandwidth: its data and the headers."""
        return len(self.data) + HEADER_BYTES
