"""The checksum of a block: XXH3 where the package `xxhash` is installed, else CRC-32.

Both run over the registered memory itself, without a copy. Of bytes that the cache still holds,
XXH3 takes 0.01 CPU seconds per GB and CRC-32 0.15 (AVX-512; cold memory costs both 0.03 more); the
two ends of a stream agree on one in their handshake. Neither protects against a peer that lies:
they find bytes that were damaged, mixed up or reused.
"""

from __future__ import annotations

import functools
import importlib
import logging
import zlib
from collections.abc import Callable
from typing import Final, Literal

import attrs
from typing_extensions import Buffer

from trinamo.runtime.errors import RefusedError

_log = logging.getLogger("trinamo.tcp")
STRETCH_BYTES: Final = 1 << 20
"""Larger blocks are summed in stretches, so that the event loop gets its turn between them."""

ChecksumChoice = Literal["auto", "crc32", "none"]


@attrs.frozen
class Checksum:
    """One algorithm."""

    name: str
    of: Callable[[Buffer], int]
    """The sum of some bytes; less than 2**64."""


NO_CHECKSUM: Final = Checksum("none", lambda _: 0)
_CRC32: Final = Checksum("crc32", zlib.crc32)


@functools.cache
def _xxh3() -> Checksum | None:
    try:
        return Checksum("xxh3", importlib.import_module("xxhash").xxh3_64_intdigest)
    except ImportError:
        _log.info(
            "xxhash is not installed: blocks are checked by CRC-32, which costs several times as "
            "much; pip install 'trinamo[checksums]'"
        )
        return None


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
