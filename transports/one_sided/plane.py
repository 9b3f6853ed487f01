"""The transfer plane over a backend of one-sided transfers; what NIXL and Mooncake share.

It owns regions with their access pages, scratch slots, and transfers; the backend owns the library.
At most as many transfers run at once as there are slots, the others wait in order.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio

from trinamo.runtime.errors import (
    ConnectError,
    DeadlineError,
    DisconnectedError,
    KilledError,
    OverloadedError,
    RemoteProtocolError,
    RequestError,
    StaleMemoryError,
    TrinamoError,
)
from trinamo.runtime.logs.notices import LogNotices
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.planes.transfer import MemoryRegion, Registrable, RemoteMemory
from trinamo.runtime.protocol.transfer.access_page import (
    TICKET_BLOCKS_MAX,
    AccessPage,
    page_bytes,
)
from trinamo.runtime.protocol.transfer.completion import decode_completion
from trinamo.runtime.protocol.transfer.description import (
    BLOCKS_MAX,
    Direction,
    MemoryDescription,
    decode_description,
)

from .address import SLOT_BYTES, allocate, pack_address, parse_remote
from .memory import Memory, OneSidedRegion, OneSidedRemote, synchronize_of
from .region import check_parts, check_size
from .state import plan_transfer
from .transfer import (
    Backend,
    Look,
    OneSidedTransfer,
    take_steps,
)

_log = logging.getLogger("trinamo.transfer")
REGIONS_MAX: Final = 1024
"""Regions that one plane registers in its life: their pages stay, so that late peers are refused."""
PROBES_MAX: Final = 16
"""Probes at once, those of peers that hang included."""


class OneSidedPlane:
    """Implements `planes.transfer.TransferPlane`; made by `open_one_sided_plane`."""

    def __init__(
        self,
        library: Backend,
        nursery: trio.Nursery,
        *,
        incarnation: str,
        connect_timeout_s: float,
        drain_s: float,
        chunk_bytes: int,
    ) -> None:
        self.backend: Final = library.name
        self.incarnation: Final = incarnation
        self.refused_count = 0
        """Notifications that were dropped, because they showed no ticket of a live grant."""
        self.is_left_moving = False
        """Whether bytes may move until the process ends; known once the plane is closed."""
        self._library, self._nursery = library, nursery
        self._notices = LogNotices(_log)
        self._connect_timeout_s, self._drain_s = connect_timeout_s, drain_s
        self._chunk_bytes = chunk_bytes
        self._regions: dict[int, OneSidedRegion] = {}
        self._pages: list[memoryview] = []
        self._numbers = 0
        # Probes have slots of their own: they must get through when all others are stuck.
        self._probe_slots = collections.deque(range(PROBES_MAX))
        self._slots = collections.deque(range(PROBES_MAX, library.slot_count))
        self._waiting: collections.deque[OneSidedTransfer] = collections.deque()
        self._transfers: dict[int, OneSidedTransfer] = {}
        library.hear(self._told)

    # --- memory ----------------------------------------------------------------------------------

    async def register(
        self,
        memory: Registrable,
        *,
        block_bytes: int,
        fingerprint: str = "",
        needs_ticket: bool = False,
        parts: int = 1,
    ) -> OneSidedRegion:
        """Register with the library, which may pin the pages. Cancelled, it is given back."""
        whole = Memory.of(memory)
        ours = attrs.evolve(whole, length=check_size(whole.length, block_bytes))
        length = ours.length * len(ours.addresses)
        pool_blocks = check_parts(length // block_bytes, parts)
        if needs_ticket and pool_blocks > TICKET_BLOCKS_MAX:
            raise RequestError(f"{pool_blocks} blocks with tickets; at most {TICKET_BLOCKS_MAX}")
        if self._numbers == REGIONS_MAX:
            raise OverloadedError(
                f"{REGIONS_MAX} regions were registered", bound="regions", value=REGIONS_MAX
            )
        self._numbers += 1
        number = self._numbers
        page_memory, view = allocate(page_bytes(pool_blocks, needs_ticket=needs_ticket))
        await self._library.register(page_memory)
        self._pages.append(view)
        await self._library.register(ours)
        described = MemoryDescription(
            backend=self.backend,
            incarnation=self.incarnation,
            region=number,
            generation=1,
            fingerprint=fingerprint,
            bases=ours.addresses,
            length=length,
            block_bytes=block_bytes,
            parts=parts,
            address=pack_address(self._library.address(), page_memory, ours),
        )
        page = AccessPage(
            view,
            incarnation=self.incarnation,
            region=number,
            block_count=pool_blocks,
            needs_ticket=needs_ticket,
        )
        region = OneSidedRegion(described, ours, page, needs_ticket=needs_ticket)
        region.synchronize = synchronize_of(memory)
        self._regions[number] = region
        return region

    async def deregister(self, region: MemoryRegion) -> None:
        """Refuse the region, end our transfers with it, and give the memory back.

        Returns within the drain time. What a transfer has not let go of by then stays registered
        and in place until it does, also if this is cancelled: the library may be writing there.
        """
        known = self._regions.get(region.description.region)
        if known is not region or known is None:
            await trio.lowlevel.checkpoint()
            return
        del self._regions[known.description.region]
        known.withdraw()
        ours = [t for t in self._transfers.values() if t.plan.local is known]
        for transfer in ours:
            transfer.fail(StaleMemoryError("the region was deregistered"))
        is_back = trio.Event()
        self._nursery.start_soon(self._give_back, known, ours, is_back)
        with trio.move_on_after(self._drain_s) as scope:
            await is_back.wait()
        if scope.cancelled_caught:
            _log.error("memory that transfers have not let go of stays registered until they do")

    async def _give_back(
        self, region: OneSidedRegion, transfers: Sequence[OneSidedTransfer], is_back: trio.Event
    ) -> None:
        for transfer in transfers:
            await transfer.wait_settled()
        try:
            await self._library.deregister(region.memory)
        except TrinamoError as error:
            _log.error("memory could not be given back, and is kept: %s", error)
        else:
            region.memory = attrs.evolve(region.memory, anchor=None)
        is_back.set()

    # --- peers -----------------------------------------------------------------------------------

    async def connect(self, description: bytes) -> OneSidedRemote:
        """Learn the peer and read the page of the region, within the time to connect."""
        remote = parse_remote(decode_description(description, backend=self.backend))
        if remote.description.incarnation == self.incarnation:
            raise RemoteProtocolError("the described memory is our own")
        await self.probe(remote)
        return remote

    async def probe(self, remote: RemoteMemory) -> None:
        """Read the page of the region; a lost connection is made anew for it."""
        assert isinstance(remote, OneSidedRemote), "memory of a peer of another plane"
        peer = remote.description.incarnation
        try:
            with trio.fail_after(self._connect_timeout_s):
                await self._look(remote)
        except trio.TooSlowError:
            raise ConnectError(
                f"peer {peer} did not answer within {self._connect_timeout_s:g} s"
            ) from None
        except DisconnectedError as error:
            raise ConnectError(f"peer {peer} cannot be reached: {error.message}") from None

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

    async def forget(self, incarnation: str) -> None:
        """End the transfers with a peer; what cannot be ended within the drain time is left."""
        theirs = [t for t in self._transfers.values() if t.incarnation == incarnation]
        error = DisconnectedError(f"peer {incarnation} was forgotten")
        for transfer in theirs:
            transfer.fail(error)
        with trio.move_on_after(self._drain_s):
            await self._library.forget(incarnation)
        await self._end(theirs, error)

    async def _end(self, transfers: Sequence[OneSidedTransfer], error: TrinamoError) -> None:
        for transfer in transfers:
            transfer.fail(error)
        with trio.move_on_after(self._drain_s) as scope:
            for transfer in transfers:
                await transfer.wait_settled()
        if scope.cancelled_caught:
            _log.error("transfers did not settle within %g s: %s", self._drain_s, error.message)

    # --- transfers -------------------------------------------------------------------------------

    def start(
        self,
        direction: Direction,
        local: MemoryRegion,
        local_blocks: Sequence[int],
        remote: RemoteMemory,
        remote_blocks: Sequence[int],
        *,
        deadline_s: float,
        notify: bytes | None = None,
        ticket: int = 0,
    ) -> OneSidedTransfer:
        """Start one transfer, or queue it if as many as there are slots run already."""
        assert isinstance(local, OneSidedRegion), "memory of another plane"
        assert isinstance(remote, OneSidedRemote), "memory of a peer of another plane"
        plan = plan_transfer(
            direction,
            local,
            local_blocks,
            remote,
            remote_blocks,
            deadline_s=deadline_s,
            notify=notify,
            ticket=ticket,
        )
        transfer = OneSidedTransfer(
            plan, backend=self.backend, path=self._library.path, on_settled=self._on_settled
        )
        self._transfers[id(transfer)] = transfer
        self._waiting.append(transfer)
        self._submit_waiting()
        if not transfer.is_over:
            self._nursery.start_soon(self._keep_time, transfer)
        return transfer

    def _submit_waiting(self) -> None:
        while self._waiting and self._slots:
            transfer = self._waiting.popleft()
            if not transfer.is_settled:
                transfer.slot = self._slots.popleft()
                size = transfer.plan.local.block_bytes
                chunk_blocks = min(BLOCKS_MAX, max(1, self._chunk_bytes // size))
                transfer.steps = take_steps(transfer, self._view(transfer.slot), chunk_blocks)
                self._library.submit(transfer)

    def _on_settled(self, transfer: OneSidedTransfer) -> None:
        self._transfers.pop(id(transfer), None)
        if transfer.slot >= 0:
            self._slots.append(transfer.slot)
            self._submit_waiting()

    async def _keep_time(self, transfer: OneSidedTransfer) -> None:
        with trio.move_on_after(transfer.plan.deadline_s):
            await transfer.wait_over()
        total = transfer.plan.block_count
        transfer.fail(
            DeadlineError(
                f"{transfer.confirmed_count} of {total} blocks were moved within "
                f"{transfer.plan.deadline_s:g} s"
            )
        )
        if transfer.slot < 0:
            # It never began, so there is nothing to wait for.
            transfer.settle()

    def _told(self, peer: str, data: bytes) -> None:
        """A peer says that it is done: who granted the blocks hears it, if there is a grant."""
        try:
            notice = decode_completion(data)
            region = self._regions.get(notice.region)
            if region is None:
                raise StaleMemoryError(f"there is no region {notice.region}")
            region.access.complete(notice.ticket, notice.message)
        except TrinamoError as error:
            self.refused_count += 1
            self._notices.warn(f"{self.backend}: a notification is refused", f"{peer}: {error}")

    # --- the end ---------------------------------------------------------------------------------

    async def close(self) -> None:
        """Refuse all memory and end all transfers; returns within the drain time."""
        for region in self._regions.values():
            region.withdraw()
        error = KilledError("the plane is closed", reason="closed")
        await self._end(list(self._transfers.values()), error)


@asynccontextmanager
async def open_one_sided_plane(
    backend: Backend,
    *,
    incarnation: str,
    connect_timeout_s: float,
    drain_s: float,
    chunk_bytes: int,
) -> AsyncIterator[OneSidedPlane]:
    """Start the backend and serve registered memory until the block is left; then close it.

    A library that still moves bytes must not lose the memory under it: to end the transfers and to
    close the backend are the waits that a cancellation does not cut short, and they are bounded.
    """
    plane: OneSidedPlane | None = None
    try:
        await backend.start()
        async with open_nursery() as nursery:
            plane = OneSidedPlane(
                backend,
                nursery,
                incarnation=incarnation,
                connect_timeout_s=connect_timeout_s,
                drain_s=drain_s,
                chunk_bytes=chunk_bytes,
            )
            try:
                yield plane
            finally:
                with trio.CancelScope(shield=True):
                    await plane.close()
                nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            may_move = await backend.close()
            if plane is not None:
                plane.is_left_moving = may_move
