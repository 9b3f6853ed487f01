"""Pieces of a stream, sealed: for more bytes than TLS moves well.

    bytes of the rest (4) | AES-256-GCM of some bytes, with its tag

Each key seals one direction of one connection, and the nonce of a piece is its number there: none meets a
key twice, and what was left out, repeated or moved does not open. Both ends tell their keys over TLS, so they
are of this connection alone, and who learns the cluster's secret later opens nothing.
"""

from __future__ import annotations

import struct
from typing import Final

from trinamo.runtime.errors import RemoteProtocolError

PIECE_KEY_BYTES: Final = 32
PIECE_LENGTH: Final = struct.Struct(">I")
PIECE_TAG_BYTES: Final = 16
PIECE_GROWTH: Final = PIECE_LENGTH.size + PIECE_TAG_BYTES
_NONCE_BYTES: Final = 12


class PieceKey:
    """Seals, or opens, the pieces of one direction in their order."""

    def __init__(self, key: bytes) -> None:
        # Who has no secret never needs it, and its import takes a while.
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher, self._unopened = AESGCM(key), InvalidTag
        self._number = 0

    def seal_into(self, data: bytes | memoryview, place: memoryview) -> int:
        """Write the piece for `data` to the start of `place`; how long it is."""
        size = len(data) + PIECE_TAG_BYTES
        PIECE_LENGTH.pack_into(place, 0, size)
        self._cipher.encrypt_into(self._nonce(), data, None, place[PIECE_LENGTH.size :][:size])
        return PIECE_LENGTH.size + size

    def open_into(self, sealed: memoryview, place: memoryview) -> int:
        """Write what a piece holds to `place`, and say how much; `sealed` begins behind its length.

        Raises `RemoteProtocolError` for what is not the next piece of who has the key.
        """
        size = sealed.nbytes - PIECE_TAG_BYTES
        try:
            self._cipher.decrypt_into(self._nonce(), sealed, None, place[:size])
        except self._unopened:
            raise RemoteProtocolError(
                "a piece was changed on its way, or is not the next"
            ) from None
        return size

    def _nonce(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(_NONCE_BYTES, "big")
