"""What a router's notification carries beside its message, so that it is heard once. Sans-IO.

A move that falls back after its last block says `notify` again over the next backend: it cannot
know whether the first was heard. Every move therefore numbers its notification, and the receiving
router (`kv/notices.py`) drops a number that it has seen.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Final

import msgspec

from ..errors import RemoteProtocolError, RequestError
from .transfer import NOTIFY_BYTES_MAX
from .undecodable import UNDECODABLE

__all__ = [
    "NOTICE_BYTES_MAX",
    "REMEMBERED_MAX",
    "Notice",
    "NoticeFilter",
    "decode_notice",
    "encode_notice",
]

NOTICE_BYTES_MAX: Final = NOTIFY_BYTES_MAX - 96
"""Of the message; sender and number take the rest."""
REMEMBERED_MAX: Final = 16_384
"""Notices a receiver remembers: four times what can wait there, so a repeat is always known."""


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """A peer's router says that a move with our memory is done."""

    sender: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    """The sender's `TransferRouter.incarnation`."""
    number: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    """Counts the sender's moves; the same for every attempt of one."""
    message: Annotated[bytes, msgspec.Meta(max_length=NOTICE_BYTES_MAX)]
    """What the sender's caller gave as `notify`."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Notice)


def encode_notice(notice: Notice) -> bytes:
    """The bytes for a transfer's `notify`; `RequestError` for a message that is too long."""
    if len(notice.message) > NOTICE_BYTES_MAX:
        raise RequestError(
            f"a notification of {len(notice.message)} bytes; at most {NOTICE_BYTES_MAX} are sent"
        )
    return _encoder.encode(notice)


def decode_notice(data: bytes) -> Notice:
    """The notice in `data`; `RemoteProtocolError` for anything else."""
    if len(data) > NOTIFY_BYTES_MAX:
        raise RemoteProtocolError(f"a notification of {len(data)} bytes")
    try:
        return _decoder.decode(data)
    except UNDECODABLE as error:
        raise RemoteProtocolError(f"not a router's notification: {error}") from error


class NoticeFilter:
    """Remembers the last `REMEMBERED_MAX` notices."""

    def __init__(self, remembered_max: int = REMEMBERED_MAX) -> None:
        self._remembered_max = remembered_max
        self._seen: OrderedDict[tuple[str, int], None] = OrderedDict()

    def is_new(self, notice: Notice) -> bool:
        """Whether it was not heard before; it is remembered from now on."""
        key = notice.sender, notice.number
        if key in self._seen:
            return False
        self._seen[key] = None
        if len(self._seen) > self._remembered_max:
            self._seen.popitem(last=False)
        return True
