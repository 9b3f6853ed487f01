"""Registered memory as every transfer plane has it; a backend adds how a withdrawal is enforced.

`host_buffers` is the one check of memory of the process that is to be registered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import attrs
import msgspec
from typing_extensions import Buffer

from trinamo.runtime.errors import RequestError
from trinamo.runtime.planes.transfer import DeviceMemory, Registrable
from trinamo.runtime.protocol.transfer.access import AccessTable, OnComplete, unheard
from trinamo.runtime.protocol.transfer.description import (
    BLOCK_BYTES_MAX,
    BUFFERS_MAX,
    PARTS_MAX,
    MemoryDescription,
    encode_description,
)


class BlockRegion:
    """One registered region. Implements `MemoryRegion`, but for what enforces `is_fenced`."""

    def __init__(
        self, described: MemoryDescription, *, needs_ticket: bool, is_fenced: bool
    ) -> None:
        self.access = AccessTable(
            described.pool_blocks, needs_ticket=needs_ticket, parts=described.parts
        )
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
    """A region of this process's memory, which `views` show, all as long."""

    def __init__(
        self,
        views: Sequence[memoryview],
        described: MemoryDescription,
        *,
        needs_ticket: bool,
        is_fenced: bool,
    ) -> None:
        super().__init__(described, needs_ticket=needs_ticket, is_fenced=is_fenced)
        self.views = list(views)
        self.buffer_blocks = described.block_count // len(views)
        """How many blocks each buffer holds; blocks of two buffers are no neighbours."""

    def block(self, number: int) -> memoryview:
        """The bytes of one block."""
        return self.span(number, 0, self.block_bytes)

    def span(self, number: int, start: int, stop: int) -> memoryview:
        """The bytes `start` to `stop`, counted from the begin of one block, of one buffer."""
        index, place = divmod(number, self.buffer_blocks)
        first = place * self.block_bytes
        return self.views[index][first + start : first + stop]


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


def buffers_of(memory: Registrable) -> Sequence[Buffer | DeviceMemory]:
    """The buffers of what a caller registers; `RequestError` for none or too many."""
    if not isinstance(memory, (list, tuple)):
        return [cast("Buffer | DeviceMemory", memory)]
    if not 1 <= len(memory) <= BUFFERS_MAX:
        raise RequestError(f"a region of {len(memory)} buffers; 1 to {BUFFERS_MAX} are registered")
    return memory


def host_buffers(memory: Registrable, block_bytes: int, *, backend: str) -> list[memoryview]:
    """The bytes of the buffers to register, each without a tail that is no block.

    Raises `RequestError` for a device's memory, for buffers of different lengths or that hold no
    block, and for what `writable_bytes` refuses.
    """
    views = []
    for each in buffers_of(memory):
        if isinstance(each, DeviceMemory):
            raise RequestError(f"{backend} moves memory of the process, not of a device")
        view = writable_bytes(each)
        views.append(view[: check_size(view.nbytes, block_bytes)])
    check_alike(view.nbytes for view in views)
    return views


def check_alike(values: Iterable[object]) -> None:
    """Raise `RequestError` unless all buffers of a region are the same in this."""
    if len(found := sorted(map(str, set(values)))) > 1:
        raise RequestError(f"buffers of one region are alike, not {' and '.join(found)}")


def check_size(length: int, block_bytes: int) -> int:
    """How many bytes of `length` are whole blocks; `RequestError` if none are."""
    if not 1 <= block_bytes <= BLOCK_BYTES_MAX:
        raise RequestError(f"blocks of {block_bytes} bytes; 1 to {BLOCK_BYTES_MAX} are moved")
    whole = length // block_bytes * block_bytes
    if not whole:
        raise RequestError(f"memory of {length} bytes holds no block of {block_bytes}")
    return whole


def check_parts(block_count: int, parts: int) -> int:
    """How many blocks of the pool `block_count` blocks are; `RequestError` for no whole number."""
    if not 1 <= parts <= PARTS_MAX or block_count % parts:
        raise RequestError(f"{block_count} blocks are no whole number of {parts} parts each")
    return block_count // parts
