"""What the notification of a one-sided backend carries: the grant that it completes. Sans-IO.

Those backends bring bytes from whoever can reach the process, so a notification counts only if it
shows the ticket of a live grant (`AccessTable.complete`). A stream's `Notify` says the same.
"""

from __future__ import annotations

import struct
from typing import Final

import attrs

from ...errors import RemoteProtocolError
from .description import NOTIFY_BYTES_MAX

_HEAD: Final = struct.Struct("<QQ")


@attrs.frozen
class Completion:
    """A transfer with blocks of ours is done, says who started it."""

    region: int
    """The number of our region it moved blocks to or from."""
    ticket: int
    """What the blocks were granted to."""
    message: bytes
    """What the peer's caller gave as `notify`."""


def encode_completion(notice: Completion) -> bytes:
    """The bytes that `decode_completion` takes."""
    return _HEAD.pack(notice.region, notice.ticket) + notice.message


def decode_completion(data: bytes) -> Completion:
    """The notice in `data`; `RemoteProtocolError` for anything else."""
    if not _HEAD.size <= len(data) <= _HEAD.size + NOTIFY_BYTES_MAX:
        raise RemoteProtocolError(f"a notification of {len(data)} bytes")
    region, ticket = _HEAD.unpack_from(data)
    return Completion(region, ticket, data[_HEAD.size :])
