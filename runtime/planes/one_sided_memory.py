"""Memory of one-sided backends: ranges of addresses, our regions, and those of peers.

Every region has an access page that peers read (`protocol/access_page.py`); what is decided here
is shown there. Who moves what is in `one_sided.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import msgspec
from typing_extensions import Buffer

from ..errors import RequestError, TrinamoError
from ..protocol.access_page import AccessPage, Expected
from ..protocol.transfer import BLOCK_BYTES_MAX, MemoryDescription, encode_description
from ..protocol.transfer_access import AccessTable
from .transfer import DeviceMemory

__all__ = ["Memory", "OneSidedRegion", "OneSidedRemote", "check_size"]


@attrs.frozen(kw_only=True)
class Memory:
    """A range of addresses, held alive by whoever made it."""

    address: int
    length: int
    device: int | None = None
    """A GPU's number; None for memory of the process."""

    @classmethod
    def of(cls, memory: Buffer | DeviceMemory) -> tuple[Memory, Any]:
        """The range of what a caller registers, and what keeps it in place.

        Raises `RequestError` for memory that is read-only or not contiguous.
        """
        if isinstance(memory, DeviceMemory):
            found = cls(address=memory.address, length=memory.length, device=memory.device)
            if memory.address <= 0 or memory.length <= 0 or memory.device < 0:
                raise RequestError("device memory has a positive address, length and device")
            return found, memory
        view = memoryview(memory)
        if view.readonly or not view.c_contiguous:
            raise RequestError("memory to register must be writable and contiguous")
        if not view.nbytes:
            raise RequestError("memory to register must not be empty")
        anchor = ctypes.c_char.from_buffer(view.cast("B"))
        return cls(address=ctypes.addressof(anchor), length=view.nbytes), anchor


class OneSidedRegion:
    """One registered region. Implements `MemoryRegion`."""

    is_fenced = False

    def __init__(
        self,
        described: MemoryDescription,
        memory: Memory,
        page: AccessPage,
        *,
        needs_ticket: bool,
    ) -> None:
        self.access = AccessTable(described.block_count, needs_ticket=needs_ticket)
        self.memory = memory
        self.synchronize: Callable[[], None] | None = None
        """Waits for the device's own work; called in the mover's thread."""
        self.anchor: Any = None
        """Keeps the buffer exported, so that it cannot move while it is registered."""
        self._described = described
        self._page = page

    @property
    def description(self) -> MemoryDescription:
        """With the generation as it is now."""
        return msgspec.structs.replace(self._described, generation=self.access.generation)

    @property
    def block_bytes(self) -> int:
        """The size of a block."""
        return self._described.block_bytes

    def describe(self) -> bytes:
        """The description as bytes."""
        return encode_description(self.description)

    def renew(self) -> int:
        """Transfers that look at the page from now on are refused."""
        generation = self.access.renew()
        self._page.renew(generation)
        return generation

    def grant(self, ticket: int, blocks: Sequence[int]) -> None:
        """Let `ticket` move these blocks; `OverloadedError` beyond `TICKETS_MAX` tickets."""
        self.access.grant(ticket, blocks)
        try:
            self._page.grant(ticket, blocks)
        except TrinamoError:
            self.access.revoke(ticket)
            raise

    def revoke(self, ticket: int) -> None:
        """Let `ticket` move nothing that is not on its way already."""
        self.access.revoke(ticket)
        self._page.revoke(ticket)

    def withdraw(self) -> None:
        """The region is deregistered."""
        if not self.access.is_withdrawn:
            self.access.withdraw()
            self._page.withdraw()


def check_size(length: int, block_bytes: int) -> int:
    """How many bytes of `length` are whole blocks; `RequestError` if none are."""
    if not 1 <= block_bytes <= BLOCK_BYTES_MAX:
        raise RequestError(f"blocks of {block_bytes} bytes; 1 to {BLOCK_BYTES_MAX} are moved")
    whole = length // block_bytes * block_bytes
    if not whole:
        raise RequestError(f"memory of {length} bytes holds no block of {block_bytes}")
    return whole


@attrs.frozen(kw_only=True)
class OneSidedRemote:
    """A peer's region that we are connected to. Implements `RemoteMemory`."""

    description: MemoryDescription
    memory: Memory
    page: int
    """The address of its access page."""
    address: bytes
    """How the mover reaches the peer."""

    @property
    def expected(self) -> Expected:
        """What its page must say."""
        described = self.description
        return Expected(
            incarnation=described.incarnation,
            region=described.region,
            generation=described.generation,
            block_count=described.block_count,
        )
