"""How a one-sided region is reached: the address in its description, and pages of our own.

Addresses come from strangers and end in a library's parser, so they are bounded and summed.
"""

from __future__ import annotations

import mmap
import zlib
from typing import Annotated, Final

import msgspec

from trinamo.runtime.errors import OverloadedError, RemoteProtocolError
from trinamo.runtime.protocol.transfer.access_page import (
    BITMAP_BYTES_MAX,
    DIRECTORY_BYTES,
    HEADER_BYTES,
)
from trinamo.runtime.protocol.transfer.description import (
    ADDRESS_BYTES_MAX,
    MemoryDescription,
)
from trinamo.runtime.protocol.undecodable import UNDECODABLE

from .memory import Memory, OneSidedRemote

SLOT_BYTES: Final = HEADER_BYTES + max(DIRECTORY_BYTES, BITMAP_BYTES_MAX)
"""What one job may read of an access page at a time."""


class _Address(msgspec.Struct, frozen=True, array_like=True):
    """What `MemoryDescription.address` holds for these backends."""

    library: bytes
    """How the library reaches the owner."""
    total: int
    """CRC-32 of all the others, so that damaged bytes never reach the library's own parser."""
    page: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    device: Annotated[int, msgspec.Meta(ge=0, le=4095)] | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Address)


def allocate(length: int) -> tuple[Memory, memoryview]:
    """Zeroed pages of our own; untouched ones cost nothing until a library pins them."""
    view = memoryview(mmap.mmap(-1, length))
    return Memory.of(view), view


def _sum(library: bytes, page: int, device: int | None) -> int:
    return zlib.crc32(f"{page} {device} ".encode("ascii") + library)


def pack_address(library: bytes, page: Memory, memory: Memory) -> bytes:
    """The address for a description; `OverloadedError` if it is too long for one."""
    total = _sum(library, page.address, memory.device)
    packed = _encoder.encode(_Address(library, total, page.address, memory.device))
    if len(packed) > ADDRESS_BYTES_MAX:
        raise OverloadedError(
            f"an address of {len(packed)} bytes", bound="address_bytes", value=len(packed)
        )
    return packed


def parse_remote(described: MemoryDescription) -> OneSidedRemote:
    """What `described` stands for; `RemoteProtocolError` if its address is none."""
    try:
        address = _decoder.decode(described.address)
    except UNDECODABLE as error:
        raise RemoteProtocolError(f"no address of {described.backend}: {error}") from error
    if _sum(address.library, address.page, address.device) != address.total:
        raise RemoteProtocolError(f"a damaged address of {described.backend}")
    if not described.bases:
        raise RemoteProtocolError(f"no address of memory for {described.backend}")
    memory = Memory(
        addresses=described.bases,
        length=described.length // len(described.bases),
        device=address.device,
    )
    return OneSidedRemote(
        description=described, memory=memory, page=address.page, address=address.library
    )
