"""What a frontend that has a status port registers: who scrapes or looks finds it there.

Nobody routes by these entries, and a frontend serves as well without.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ...errors import RemoteProtocolError
from ..undecodable import UNDECODABLE

FRONTEND_PREFIX: Final = "frontends/"
_ID_DIGITS: Final = 16


class FrontendEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One frontend process, as registered under its lease."""

    id: str
    """16 hexadecimal digits, new for every process."""
    url: str
    """Where it answers the API; several share it if they share a port."""
    status: str
    """Where it alone answers `/health` and `/metrics`."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(FrontendEntry)


def frontend_key(frontend_id: str) -> str:
    """The key of one in the control plane."""
    return FRONTEND_PREFIX + frontend_id


def encode_frontend(entry: FrontendEntry) -> bytes:
    """The value to register."""
    return _encoder.encode(entry)


def decode_frontend(key: str, value: bytes) -> FrontendEntry:
    """The frontend registered under `key`; `RemoteProtocolError` if the two do not fit."""
    try:
        entry = _decoder.decode(value)
    except UNDECODABLE as error:
        raise RemoteProtocolError(f"{key}: not a frontend: {error}") from error
    if frontend_key(entry.id) != key or len(entry.id) != _ID_DIGITS:
        raise RemoteProtocolError(f"{key}: holds the frontend {entry.id[:32]!r}")
    return entry
