"""What routers of one endpoint tell each other about the requests they have under way. Sans-IO.

`Began`, `FirstToken` and `Ended` are all that can happen to one; a batch is what one message
carries, and a snapshot is the `Began` of all that are under way. Numbers are the teller's own.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from ...errors import RemoteProtocolError
from ..undecodable import decoded
from .names import HINT_BLOCKS_MAX

_EVENTS_MAX: Final = 256
_BATCH_BYTES_MAX: Final = 1 << 18
"""Of the keys in one batch; a message holds four times as much, and NATS takes a mebibyte."""
_KEY_BYTES: Final = 8
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Keys = Annotated[bytes, msgspec.Meta(max_length=HINT_BLOCKS_MAX * _KEY_BYTES)]


class Began(msgspec.Struct, frozen=True, array_like=True, tag="began"):
    """A request was sent."""

    number: _Count
    instance_id: str
    prefill_tokens: _Count
    keys: _Keys
    """Packed."""


class FirstToken(msgspec.Struct, frozen=True, array_like=True, tag="first"):
    """Its prompt has been computed."""

    number: _Count


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """It is under way no more."""

    number: _Count


ActiveEvent = Began | FirstToken | Ended
encode_active: Final = msgspec.msgpack.Encoder().encode
"""Makes the bytes of one batch, or of a part of a snapshot."""
_decode = msgspec.msgpack.Decoder(list[ActiveEvent]).decode


def decode_active(body: bytes) -> list[ActiveEvent]:
    """What was encoded; raises `RemoteProtocolError` for anything else."""
    return decoded(_decode, body, "no requests under way")


def next_active(waiting: deque[ActiveEvent]) -> list[ActiveEvent]:
    """Take as many events from the left as one message carries."""
    batch: list[ActiveEvent] = []
    room = _BATCH_BYTES_MAX
    while waiting and len(batch) < _EVENTS_MAX and room > 0:
        event = waiting.popleft()
        batch.append(event)
        if isinstance(event, Began):
            room -= len(event.keys)
    return batch


def pack_keys(keys: Sequence[int]) -> bytes:
    return struct.pack(f">{len(keys)}Q", *keys)


def unpack_keys(packed: bytes) -> tuple[int, ...]:
    """What was packed; raises `RemoteProtocolError` if one is cut off."""
    if len(packed) % _KEY_BYTES:
        raise RemoteProtocolError(f"{len(packed)} bytes are no whole number of block keys")
    return struct.unpack(f">{len(packed) // _KEY_BYTES}Q", packed)
