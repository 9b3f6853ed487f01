"""Memory of one-sided backends: ranges of addresses, our regions, and those of peers.

Every region has an access page that peers read (`protocol/transfer/access_page.py`); what is
decided here is shown there. Who moves what is in `transfer.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from typing_extensions import Buffer, override

from trinamo.runtime.errors import RequestError, TrinamoError
from trinamo.runtime.planes.transfer import DeviceMemory
from trinamo.runtime.protocol.transfer.access import OnComplete, unheard
from trinamo.runtime.protocol.transfer.access_page import AccessPage, Expected
from trinamo.runtime.protocol.transfer.description import MemoryDescription

from .region import BlockRegion, writable_bytes

__all__ = ["Memory", "OneSidedRegion", "OneSidedRemote"]


@attrs.frozen(kw_only=True)
class Memory:
    """A range of addresses, and what keeps it in place for as long as anybody names it."""

    address: int
    length: int
    device: int | None = None
    """A GPU's number; None for memory of the process."""
    anchor: Any = attrs.field(default=None, eq=False, repr=False)
    """None for memory of a peer. Ours may be registered while nobody else holds it any more: as
    while a registration is cancelled, or a transfer does not settle."""

    @classmethod
    def of(cls, memory: Buffer | DeviceMemory) -> Memory:
        """The range of what a caller registers.

        Raises `RequestError` for memory that is read-only or not contiguous.
        """
        if isinstance(memory, DeviceMemory):
            if memory.address <= 0 or memory.length <= 0 or memory.device < 0:
                raise RequestError("device memory has a positive address, length and device")
            return cls(
                address=memory.address, length=memory.length, device=memory.device, anchor=memory
            )
        view = writable_bytes(memory)
        if not view.nbytes:
            raise RequestError("memory to register must not be empty")
        anchor = ctypes.c_char.from_buffer(view)
        return cls(address=ctypes.addressof(anchor), length=view.nbytes, anchor=anchor)


class OneSidedRegion(BlockRegion):
    """One registered region. Implements `MemoryRegion`; what is withdrawn is shown on its page."""

    def __init__(
        self,
        described: MemoryDescription,
        memory: Memory,
        page: AccessPage,
        *,
        needs_ticket: bool,
    ) -> None:
        super().__init__(described, needs_ticket=needs_ticket, is_fenced=False)
        self.memory = memory
        self.synchronize: Callable[[], None] | None = None
        """Waits for the device's own work; called in the backend's thread."""
        self._page = page

    @override
    def renew(self) -> int:
        """Transfers that look at the page from now on are refused."""
        generation = super().renew()
        self._page.renew(generation)
        return generation

    @override
    def grant(
        self,
        ticket: int,
        blocks: Sequence[int],
        on_complete: OnComplete = unheard,
        *,
        may_write: bool = True,
    ) -> None:
        """Let `ticket` move these blocks; `OverloadedError` beyond `TICKETS_MAX` tickets."""
        super().grant(ticket, blocks, on_complete, may_write=may_write)
        try:
            self._page.grant(ticket, blocks, may_write=may_write)
        except TrinamoError:
            self.access.revoke(ticket)
            raise

    @override
    def revoke(self, ticket: int) -> None:
        """Let `ticket` move nothing that is not on its way already."""
        super().revoke(ticket)
        self._page.revoke(ticket)

    @override
    def withdraw(self) -> None:
        """The region is deregistered. Again, it changes nothing."""
        if not self.access.is_withdrawn:
            super().withdraw()
            self._page.withdraw()


@attrs.frozen(kw_only=True)
class OneSidedRemote:
    """A peer's region that we are connected to. Implements `RemoteMemory`."""

    description: MemoryDescription
    memory: Memory
    page: int
    """The address of its access page."""
    address: bytes
    """How the library reaches the peer."""

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
