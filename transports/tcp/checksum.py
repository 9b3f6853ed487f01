"""The checksum of a block: XXH3 where the system has libxxhash, else CRC-32.

Both run over the registered memory itself, without a copy. CRC-32 costs about 0.25 CPU seconds per
GB and side, XXH3 about 0.07; the two ends of a stream agree on one in their handshake. Neither
protects against a peer that lies: they find bytes that were damaged, mixed up or reused.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Callable
from typing import Final, Literal

import attrs

from trinamo.runtime.errors import RefusedError

__all__ = ["NO_CHECKSUM", "PIECE_BYTES", "Checksum", "ChecksumChoice", "choose", "offered"]

PIECE_BYTES: Final = 1 << 20
"""Larger blocks are summed in pieces, so that the event loop gets its turn between them."""

ChecksumChoice = Literal["auto", "crc32", "none"]


@attrs.frozen
class Checksum:
    """One algorithm."""

    name: str
    of_address: Callable[[int, int], int] | None
    """The sum of `length` bytes at an address; None: there is only `of_view`."""

    def of(self, view: memoryview, address: int) -> int:
        """The sum of the bytes of `view`, which begin at `address`; less than 2**64."""
        if self.of_address is not None:
            return self.of_address(address, view.nbytes)
        return zlib.crc32(view)


NO_CHECKSUM: Final = Checksum("none", None)
_CRC32: Final = Checksum("crc32", None)


@functools.cache
def _xxh3() -> Checksum | None:
    try:
        function = ctypes.CDLL("libxxhash.so.0").XXH3_64bits
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_uint64
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return Checksum("xxh3", function)


def offered(choice: ChecksumChoice) -> dict[str, Checksum]:
    """What this end can compute under `choice`, best first."""
    if choice == "none":
        return {"none": NO_CHECKSUM}
    found = [_CRC32] if choice == "crc32" else [_xxh3(), _CRC32]
    return {each.name: each for each in found if each is not None}


def choose(theirs: list[str], choice: ChecksumChoice) -> Checksum:
    """The first of the peer's that we can compute too; `RefusedError` if there is none."""
    ours = offered(choice)
    for name in theirs:
        if name in ours:
            return ours[name]
    raise RefusedError(f"no checksum in common: {', '.join(theirs)} there, {', '.join(ours)} here")
