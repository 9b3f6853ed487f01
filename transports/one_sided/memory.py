"""Memory of one-sided backends: ranges of addresses, our regions, those of peers, and how to reach them.

Every region has an access page that peers read (`protocol/transfer/access_page.py`); what is
decided here is shown there. The address in a description comes from strangers and ends in a library's
parser, so it is bounded and summed. Who moves what is in `steps.py`.
"""

from __future__ import annotations

import ctypes
import mmap
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import attrs
import msgspec
from typing_extensions import Buffer, override

from trinamo.runtime.errors import (
    OverloadedError,
    RemoteProtocolError,
    RequestError,
    TrinamoError,
)
from trinamo.runtime.planes import DeviceMemory, MemoryRegion, Registrable, RemoteMemory
from trinamo.runtime.planes.regions import buffers_of, check_alike, writable_bytes
from trinamo.runtime.protocol.transfer.access import OnComplete, unheard
from trinamo.runtime.protocol.transfer.access_page import (
    BITMAP_BYTES_MAX,
    DIRECTORY_BYTES,
    HEADER_BYTES,
    AccessPage,
)
from trinamo.runtime.protocol.transfer.description import ADDRESS_BYTES_MAX, MemoryDescription
from trinamo.runtime.protocol.undecodable import decoded

SLOT_BYTES: Final = HEADER_BYTES + max(DIRECTORY_BYTES, BITMAP_BYTES_MAX)
"""What one job may read of an access page at a time."""


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


def allocate(length: int) -> tuple[Memory, memoryview]:
    """Zeroed pages of our own; untouched ones cost nothing until a library pins them."""
    view = memoryview(mmap.mmap(-1, length))
    return Memory.of(view), view


def synchronize_of(memory: Registrable) -> Callable[[], None] | None:
    """Waits for the devices' own work on all buffers; None for memory of the process."""
    waits = [each.synchronize for each in buffers_of(memory) if isinstance(each, DeviceMemory)]
    # Buffers of one engine are usually worked on by one stream, which is waited for once.
    waits = list(dict.fromkeys(waits))

    def synchronize() -> None:
        for wait in waits:
            wait()

    return synchronize if waits else None


class OneSidedRegion(MemoryRegion):
    """One registered region; what is withdrawn is shown on its page."""

    is_fenced = False

    def __init__(
        self,
        described: MemoryDescription,
        memory: Memory,
        page: AccessPage,
        *,
        needs_ticket: bool,
    ) -> None:
        super().__init__(described, needs_ticket=needs_ticket)
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
class OneSidedRemote(RemoteMemory):
    """A peer's region, and how the library reaches it."""

    memory: Memory
    page: int
    """The address of its access page."""
    address: bytes
    """How the library reaches the peer."""


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
    address = decoded(_decoder.decode, described.address, f"no address of {described.backend}")
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
