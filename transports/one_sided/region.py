"""Registered memory as every transfer plane has it; a backend adds how a withdrawal is enforced.

`whole_blocks` is the one check of a buffer that is to be registered.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import msgspec
from typing_extensions import Buffer

from trinamo.runtime.errors import RequestError
from trinamo.runtime.protocol.transfer.access import AccessTable, OnComplete, unheard
from trinamo.runtime.protocol.transfer.description import (
    BLOCK_BYTES_MAX,
    MemoryDescription,
    encode_description,
)

__all__ = [
    "BlockRegion",
    "HostRegion",
    "RemoteRegion",
    "check_size",
    "whole_blocks",
    "writable_bytes",
]


class BlockRegion:
    """One registered region. Implements `MemoryRegion`, but for what enforces `is_fenced`."""

    def __init__(
        self, described: MemoryDescription, *, needs_ticket: bool, is_fenced: bool
    ) -> None:
        self.access = AccessTable(described.block_count, needs_ticket=needs_ticket)
        self.block_bytes = described.block_bytes
        self._described = described
        self._is_fenced = is_fenced

    @property
    def is_fenced(self) -> bool:
        """Whether nothing moves any more once it is withdrawn; see `MemoryRegion.is_fenced`."""
        return self._is_fenced

    @property
    def description(self) -> MemoryDescription:
        """With the generation as it is now."""
        if self._described.generation != self.access.generation:
            self._described = msgspec.structs.replace(
                self._described, generation=self.access.generation
            )
        return self._described

    def describe(self) -> bytes:
        """The description as bytes."""
        return encode_description(self.description)

    def renew(self) -> int:
        """Refuse all descriptions given out before."""
        return self.access.renew()

    def grant(
        self,
        ticket: int,
        blocks: Sequence[int],
        on_complete: OnComplete = unheard,
        *,
        may_write: bool = True,
    ) -> None:
        """Let `ticket` move these blocks, and complete the grant."""
        self.access.grant(ticket, blocks, on_complete, may_write=may_write)

    def revoke(self, ticket: int) -> None:
        """Let `ticket` move nothing."""
        self.access.revoke(ticket)

    def withdraw(self) -> None:
        """The region is deregistered. Again, it changes nothing."""
        self.access.withdraw()


class HostRegion(BlockRegion):
    """A region of this process's memory, which `view` shows."""

    def __init__(
        self,
        view: memoryview,
        described: MemoryDescription,
        *,
        needs_ticket: bool,
        is_fenced: bool,
    ) -> None:
        super().__init__(described, needs_ticket=needs_ticket, is_fenced=is_fenced)
        self.view = view

    def block(self, number: int) -> memoryview:
        """The bytes of one block."""
        return self.view[number * self.block_bytes : (number + 1) * self.block_bytes]


@attrs.frozen
class RemoteRegion:
    """A peer's region that we are connected to. Implements `RemoteMemory`."""

    description: MemoryDescription


def writable_bytes(memory: Buffer) -> memoryview:
    """The bytes of a buffer to register; `RequestError` if it is read-only or has gaps."""
    view = memoryview(memory)
    if view.readonly or not view.c_contiguous:
        raise RequestError("memory to register must be writable and contiguous")
    return view.cast("B") if view.nbytes else view


def whole_blocks(memory: Buffer, block_bytes: int) -> memoryview:
    """The bytes of a buffer to register, without a tail; `RequestError` if it holds no block."""
    view = writable_bytes(memory)
    return view[: check_size(view.nbytes, block_bytes)]


def check_size(length: int, block_bytes: int) -> int:
    """How many bytes of `length` are whole blocks; `RequestError` if none are."""
    if not 1 <= block_bytes <= BLOCK_BYTES_MAX:
        raise RequestError(f"blocks of {block_bytes} bytes; 1 to {BLOCK_BYTES_MAX} are moved")
    whole = length // block_bytes * block_bytes
    if not whole:
        raise RequestError(f"memory of {length} bytes holds no block of {block_bytes}")
    return whole
