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
from trinamo.runtime.planes.transfer import DeviceMemory, Registrable
from trinamo.runtime.protocol.transfer.access import OnComplete, unheard
from trinamo.runtime.protocol.transfer.access_page import AccessPage, Expected
from trinamo.runtime.protocol.transfer.description import MemoryDescription

from .region import BlockRegion, buffers_of, check_alike, writable_bytes


@attrs.frozen(kw_only=True)
class Memory:
    """Ranges of addresses, all as long, and what keeps them in place while anybody names them."""

    addresses: tuple[int, ...]
    length: int
    """Of each."""
    device: int | None = None
    """A GPU's number; None for memory of the process."""
    anchor: Any = attrs.field(default=None, eq=False, repr=False)
    """None for memory of a peer. Ours may be registered while nobody else holds it any more: as
    while a registration is cancelled, or a transfer does not settle."""

    @classmethod
    def at(cls, address: int, length: int) -> Memory:
        """One range of the process that somebody else keeps in place, or of a peer."""
        return cls(addresses=(address,), length=length)

    @classmethod
    def of(cls, memory: Registrable) -> Memory:
        """The ranges of what a caller registers.

        Raises `RequestError` for memory that is read-only or not contiguous, and for buffers of
        different lengths or devices.
        """
        found = [cls._of_one(each) for each in buffers_of(memory)]
        check_alike(each.length for each in found)
        check_alike(each.device for each in found)
        return cls(
            addresses=tuple(each.address for each in found),
            length=found[0].length,
            device=found[0].device,
            anchor=[each.anchor for each in found],
        )

    @classmethod
    def _of_one(cls, memory: Buffer | DeviceMemory) -> Memory:
        if isinstance(memory, DeviceMemory):
            if memory.address <= 0 or memory.length <= 0 or memory.device < 0:
                raise RequestError("device memory has a positive address, length and device")
            one = cls.at(memory.address, memory.length)
            return attrs.evolve(one, device=memory.device, anchor=memory)
        view = writable_bytes(memory)
        if not view.nbytes:
            raise RequestError("memory to register must not be empty")
        anchor = ctypes.c_char.from_buffer(view)
        return attrs.evolve(cls.at(ctypes.addressof(anchor), view.nbytes), anchor=anchor)

    @property
    def address(self) -> int:
        """Of the first range."""
        return self.addresses[0]

    def block_address(self, number: int, block_bytes: int) -> int:
        """Where a block begins, numbered through all ranges."""
        index, place = divmod(number, self.length // block_bytes)
        return self.addresses[index] + place * block_bytes

    def apart(self, blocks: Sequence[int], block_bytes: int) -> Sequence[int]:
        """Numbers that count up by one only where the blocks are neighbours in one range."""
        if len(self.addresses) == 1:
            return blocks
        count = self.length // block_bytes
        return [block + block // count for block in blocks]


def synchronize_of(memory: Registrable) -> Callable[[], None] | None:
    """Waits for the devices' own work on all buffers; None for memory of the process."""
    waits = [each.synchronize for each in buffers_of(memory) if isinstance(each, DeviceMemory)]
    # Buffers of one engine are usually worked on by one stream, which is waited for once.
    waits = list(dict.fromkeys(waits))

    def synchronize() -> None:
        for wait in waits:
            wait()

    return synchronize if waits else None


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
            block_count=described.pool_blocks,
        )
