"""Registered memory, as every mover of blocks has it; a mover adds how a withdrawal is enforced.

`HostRegion` is memory of the process, and has the one check of what may be registered of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import attrs
import msgspec
from typing_extensions import Buffer

from ..errors import RequestError
from ..protocol.transfer.access import AccessTable, OnComplete, unheard
from ..protocol.transfer.description import (
    BLOCK_BYTES_MAX,
    BUFFERS_MAX,
    PARTS_MAX,
    MemoryDescription,
    encode_description,
)


@attrs.frozen(kw_only=True)
class DeviceMemory:
    """Memory that is no Python buffer, such as a GPU's; backends that cannot move it refuse it.

    A backend calls `synchronize` before it starts to read or write, and again before it reports a
    transfer as done: kernels still running on a stream would otherwise be overtaken.
    """

    address: int
    length: int
    device: int
    """The device's number as the backend counts them."""
    synchronize: Callable[[], None]


Registrable = Buffer | DeviceMemory | Sequence[Buffer | DeviceMemory]
"""Memory to register: one buffer, or a list of as long ones, such as one for each layer."""


class MemoryRegion:
    """Memory of ours that peers may move blocks to and from."""

    is_fenced = True
    """Whether this backend checks generation and tickets on our side, for every slice.

    Where it does, no byte lands or leaves after `revoke` or `renew` has returned. Where it does not
    (RDMA), those only refuse new transfers, and blocks given to a peer may be used again only once
    the peer has said that its transfers are settled, or is gone.
    """

    def __init__(self, described: MemoryDescription, *, needs_ticket: bool) -> None:
        self.access = AccessTable(
            described.pool_blocks, needs_ticket=needs_ticket, parts=described.parts
        )
        self.block_bytes = described.block_bytes
        self._described = described

    @property
    def description(self) -> MemoryDescription:
        """What peers must know; changes when `renew` counts the generation up."""
        if self._described.generation != self.access.generation:
            self._described = msgspec.structs.replace(
                self._described, generation=self.access.generation
            )
        return self._described

    def describe(self) -> bytes:
        """The description as bytes, at most `DESCRIPTION_BYTES_MAX`, for the peer's `connect`."""
        return encode_description(self.description)

    def renew(self) -> int:
        """Count the generation up and return it: descriptions given out before are refused."""
        return self.access.renew()

    def grant(
        self,
        ticket: int,
        blocks: Sequence[int],
        on_complete: OnComplete = unheard,
        *,
        may_write: bool = True,
    ) -> None:
        """Let transfers that carry `ticket` (not 0) move these blocks, and no others.

        The blocks are numbered as the owner's pool numbers them: all `parts` of each are granted.
        Only for regions registered with `needs_ticket`. A ticket granted again gets more blocks.
        Without `may_write` peers may only read them.
        `on_complete` is called with the `notify` of each transfer with this ticket that is done,
        until the ticket is revoked; more than once where a peer could not know that it was heard.
        """
        self.access.grant(ticket, blocks, on_complete, may_write=may_write)

    def revoke(self, ticket: int) -> None:
        """Refuse the ticket from now on; transfers under way with it fail at their next slice."""
        self.access.revoke(ticket)

    def withdraw(self) -> None:
        """Refuse everybody: the region is deregistered. Again, it changes nothing."""
        self.access.withdraw()


class HostRegion(MemoryRegion):
    """A region of this process's memory.

    `draft` says what is known before the memory is looked at; its length is that of the whole
    blocks of `memory`. Raises `RequestError` for a device's memory, for buffers of different lengths or
    that hold no block, and for what is read-only or has gaps.
    """

    def __init__(
        self, memory: Registrable, draft: MemoryDescription, *, needs_ticket: bool
    ) -> None:
        size = draft.block_bytes
        self.views: list[memoryview] = []
        """Of each buffer, without a tail that is no block; all as long."""
        for each in buffers_of(memory):
            if isinstance(each, DeviceMemory):
                raise RequestError(f"{draft.backend} moves memory of the process, not of a device")
            view = writable_bytes(each)
            self.views.append(view[: check_size(view.nbytes, size)])
        check_alike(view.nbytes for view in self.views)
        length = sum(view.nbytes for view in self.views)
        check_parts(length // size, draft.parts)
        super().__init__(msgspec.structs.replace(draft, length=length), needs_ticket=needs_ticket)
        self.buffer_blocks = length // size // len(self.views)
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
class RemoteMemory:
    """A peer's region that we are connected to; a mover adds how it is reached."""

    description: MemoryDescription
    """As the peer gave it, checked."""


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
