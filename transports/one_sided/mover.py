"""What NIXL and Mooncake share: a mover of blocks over a library of one-sided transfers.

It owns regions with their access pages, scratch slots, and what waits for one; the backend owns the
library. At most as many transfers run at once as there are slots, the others wait in order.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import attrs
import msgspec
import trio

from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    OverloadedError,
    RemoteProtocolError,
    RequestError,
    TrinamoError,
)
from trinamo.runtime.logs.notices import LogNotices
from trinamo.runtime.planes import Mover, Registrable, Transfer, TransferPlane
from trinamo.runtime.planes.regions import check_parts, check_size
from trinamo.runtime.planes.transfer import open_plane
from trinamo.runtime.protocol.transfer.access_page import (
    TICKET_BLOCKS_MAX,
    AccessPage,
    decode_completion,
    page_bytes,
)
from trinamo.runtime.protocol.transfer.description import BLOCKS_MAX, MemoryDescription

from .memory import (
    SLOT_BYTES,
    Memory,
    OneSidedRegion,
    OneSidedRemote,
    allocate,
    pack_address,
    parse_remote,
    synchronize_of,
)
from .steps import Backend, Look, Move

_log = logging.getLogger("trinamo.transfer")
REGIONS_MAX: Final = 1024
"""Regions that one plane registers in its life: their pages stay, so that late peers are refused."""
PROBES_MAX: Final = 16
"""Probes at once, those of peers that hang included."""


class OneSidedMover(Mover[OneSidedRegion]):
    """Blocks over one library; `open_one_sided_plane` makes the plane."""

    def __init__(
        self, library: Backend, *, incarnation: str, connect_timeout_s: float, chunk_bytes: int
    ) -> None:
        super().__init__(incarnation)
        self.backend, self.path = library.name, library.path
        self.refused_count = 0
        """Notifications that were dropped, because they showed no ticket of a live grant."""
        self.is_left_moving = False
        """Whether bytes may move until the process ends; known once the plane is closed."""
        self._library = library
        self._notices = LogNotices(_log)
        self._connect_timeout_s, self._chunk_bytes = connect_timeout_s, chunk_bytes
        self._pages: list[memoryview] = []
        # Probes have slots of their own: they must get through when all others are stuck.
        self._probe_slots = collections.deque(range(PROBES_MAX))
        self._slots = collections.deque(range(PROBES_MAX, library.slot_count))
        self._waiting: collections.deque[Transfer] = collections.deque()
        library.on_told = self._told

    # --- memory ----------------------------------------------------------------------------------

    async def register(
        self, memory: Registrable, draft: MemoryDescription, *, needs_ticket: bool
    ) -> OneSidedRegion:
        """Register with the library, which may pin the pages, and make the page beside it."""
        size = draft.block_bytes
        whole = Memory.of(memory)
        ours = attrs.evolve(whole, length=check_size(whole.length, size))
        length = ours.length * len(ours.addresses)
        pool_blocks = check_parts(length // size, draft.parts)
        if needs_ticket and pool_blocks > TICKET_BLOCKS_MAX:
            raise RequestError(f"{pool_blocks} blocks with tickets; at most {TICKET_BLOCKS_MAX}")
        if len(self._pages) == REGIONS_MAX:
            raise OverloadedError(
                f"{REGIONS_MAX} regions were registered", bound="regions", value=REGIONS_MAX
            )
        page_memory, view = allocate(page_bytes(pool_blocks, needs_ticket=needs_ticket))
        await self._library.register(page_memory)
        self._pages.append(view)
        await self._library.register(ours)
        described = msgspec.structs.replace(
            draft,
            bases=ours.addresses,
            length=length,
            address=pack_address(self._library.address(), page_memory, ours),
        )
        page = AccessPage(
            view,
            incarnation=self.incarnation,
            region=draft.region,
            block_count=pool_blocks,
            needs_ticket=needs_ticket,
        )
        region = OneSidedRegion(described, ours, page, needs_ticket=needs_ticket)
        region.synchronize = synchronize_of(memory)
        return region

    async def deregister(self, region: OneSidedRegion) -> None:
        """Let the library unpin the pages; what it refuses to give back stays in its place."""
        try:
            await self._library.deregister(region.memory)
        except TrinamoError as error:
            _log.error("memory could not be given back, and is kept: %s", error)
        else:
            region.memory = attrs.evolve(region.memory, anchor=None)

    # --- peers -----------------------------------------------------------------------------------

    async def ask(self, described: MemoryDescription) -> OneSidedRemote:
        """Read the page of the region; a lost connection is made anew for it."""
        remote, peer = parse_remote(described), described.incarnation
        if peer == self.incarnation:
            raise RemoteProtocolError("the described memory is our own")
        try:
            with trio.fail_after(self._connect_timeout_s):
                await self._look(remote)
        except trio.TooSlowError:
            raise ConnectError(
                f"peer {peer} did not answer within {self._connect_timeout_s:g} s"
            ) from None
        except DisconnectedError as error:
            raise ConnectError(f"peer {peer} cannot be reached: {error.message}") from None
        return remote

    async def _look(self, remote: OneSidedRemote) -> None:
        await self._library.connect(remote)
        if not self._probe_slots:
            raise ConnectError(f"{PROBES_MAX} probes of other peers have no answer yet")
        slot = self._probe_slots.popleft()
        # A probe that nobody waits for any more keeps its slot until the library lets go of it.
        job = Look(remote, slot, self._view(slot), self._probe_slots.append)
        self._library.submit(job)
        await job.done.wait()
        if job.error is not None:
            raise job.error

    def _view(self, slot: int) -> memoryview:
        return self._library.scratch[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]

    async def close(self, incarnation: str) -> None:
        """Have the library drop the peer; what cannot be ended is left."""
        await self._library.forget(incarnation)

    # --- transfers -------------------------------------------------------------------------------

    def move(self, transfer: Transfer) -> None:
        """Submit it, or queue it if as many as there are slots run already."""
        assert isinstance(transfer.local, OneSidedRegion), "memory of another plane"
        assert isinstance(transfer.remote, OneSidedRemote), "memory of a peer of another plane"
        self._waiting.append(transfer)
        self._submit_waiting()

    def _submit_waiting(self) -> None:
        while self._waiting and self._slots:
            transfer = self._waiting.popleft()
            if not transfer.is_over:  # Else it never began, and was settled at once.
                transfer.let_go = lambda: False  # The library settles it, when it has let go.
                slot = self._slots.popleft()
                chunk_blocks = max(1, self._chunk_bytes // transfer.local.block_bytes)
                self._library.submit(
                    Move(
                        transfer,
                        slot,
                        self._view(slot),
                        min(BLOCKS_MAX, chunk_blocks),
                        self._give_back,
                    )
                )

    def _give_back(self, slot: int) -> None:
        self._slots.append(slot)
        self._submit_waiting()

    def _told(self, peer: str, data: bytes) -> None:
        """A peer says that it is done: who granted the blocks hears it, if there is a grant."""
        try:
            notice = decode_completion(data)
            self.region(notice.region).access.complete(notice.ticket, notice.message)
        except TrinamoError as error:
            self.refused_count += 1
            self._notices.warn(f"{self.backend}: a notification is refused", f"{peer}: {error}")


@asynccontextmanager
async def open_one_sided_plane(
    backend: Backend,
    *,
    incarnation: str,
    connect_timeout_s: float,
    drain_s: float,
    chunk_bytes: int,
) -> AsyncIterator[TransferPlane[OneSidedMover]]:
    """Start the backend and serve registered memory until the block is left; then close it.

    A library that still moves bytes must not lose the memory under it: to end the transfers and to
    close the backend are the waits that a cancellation does not cut short, and they are bounded.
    """
    mover: OneSidedMover | None = None
    try:
        await backend.start()
        mover = OneSidedMover(
            backend,
            incarnation=incarnation,
            connect_timeout_s=connect_timeout_s,
            chunk_bytes=chunk_bytes,
        )
        async with open_plane(mover, drain_s=drain_s, close_s=drain_s, is_shielded=True) as plane:
            yield plane
    finally:
        with trio.CancelScope(shield=True):
            may_move = await backend.close()
            if mover is not None:
                mover.is_left_moving = may_move
