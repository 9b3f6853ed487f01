"""What a process offers its peers to move its memory by: one description for each backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from ...errors import RemoteProtocolError
from ..undecodable import UNDECODABLE
from .description import DESCRIPTION_BYTES_MAX, decode_description

__all__ = ["BACKENDS_MAX", "decode_offer", "encode_offer"]

BACKENDS_MAX: Final = 8

_decoder = msgspec.msgpack.Decoder(
    Annotated[list[bytes], msgspec.Meta(min_length=1, max_length=BACKENDS_MAX)]
)


def encode_offer(descriptions: Sequence[bytes]) -> bytes:
    """The bytes that `decode_offer` takes."""
    return msgspec.msgpack.encode(list(descriptions))


def decode_offer(data: bytes) -> dict[str, bytes]:
    """Descriptions by backend, each checked; `RemoteProtocolError` for anything else.

    All of them must describe memory of the same size, block size and fingerprint.
    """
    if len(data) > BACKENDS_MAX * DESCRIPTION_BYTES_MAX:
        raise RemoteProtocolError(f"an offer of {len(data)} bytes")
    try:
        descriptions: list[bytes] = _decoder.decode(data)
    except UNDECODABLE as error:
        raise RemoteProtocolError(f"not an offer of memory: {error}") from error
    offered: dict[str, bytes] = {}
    shapes: dict[tuple[int, int, str], None] = {}
    for each in descriptions:
        described = decode_description(each)
        offered[described.backend] = each
        shapes[described.length, described.block_bytes, described.fingerprint] = None
    if len(shapes) > 1:
        raise RemoteProtocolError("an offer of memory of different shapes")
    return offered
