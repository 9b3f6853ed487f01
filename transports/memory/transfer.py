"""The transfer plane in memory: planes of one process that know each other by a fabric.

It is the model of the plane, with everything that can go wrong at the push of a button
(`TransferFaults`): also what RDMA does and TCP does not, bytes that go on landing after an abort.
The conformance suite holds it to the same behaviour as the real backends.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from typing import Final

import attrs
import trio
from typing_extensions import override

from trinamo.runtime.env import Env, RealEnv
from trinamo.runtime.errors import (
    ConnectError,
    CorruptedError,
    DeadlineError,
    DisconnectedError,
    StaleMemoryError,
    TrinamoError,
)
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.planes import (
    MemoryRegion,
    Registrable,
    RemoteMemory,
    TransferReport,
)
from trinamo.runtime.planes.settlement import Answers, InquiryReport, IsSettled
from trinamo.runtime.protocol.transfer.description import (
    Direction,
    MemoryDescription,
    decode_description,
    draw_incarnation,
)
from trinamo.runtime.protocol.transfer.settlement import InquiryResult
from trinamo.transports.one_sided.region import (
    HostRegion,
    RemoteRegion,
    check_parts,
    host_buffers,
)
from trinamo.transports.one_sided.state import TransferPlan, TransferState, plan_transfer

from .transfer_faults import TransferFaults


class TransferFabric:
    """The planes that can reach each other."""

    def __init__(self) -> None:
        self.planes: dict[str, MemoryTransferPlane] = {}
        self.listeners: dict[str, MemoryTransferPlane] = {}
        """Who answers inquiries, by address."""


_Plan = TransferPlan[HostRegion, RemoteMemory]


class MemoryTransfer(TransferState):
    """One transfer. Implements `planes.transfer.Transfer`."""

    def __init__(self, plane: MemoryTransferPlane, plan: _Plan) -> None:
        super().__init__()
        self.peer = plan.there.incarnation
        self.local = plan.local
        self._plane, self._plan = plane, plan
        self._faults = attrs.evolve(plane.faults)
        self._moved = 0
        self._scope = trio.CancelScope()

    @override
    def fail(self, error: TrinamoError) -> None:
        """End it with this error, unless it is over."""
        if not self.is_over:
            super().fail(error)
            if not self._faults.lands_late:
                self.settle()
                self._scope.cancel()

    async def drive(self) -> None:
        """Move the blocks; run in the plane's nursery, raises nothing."""
        clock = self._plane.env.clock
        started_at = clock.now()
        with self._scope:
            try:
                with trio.move_on_after(self._plan.deadline_s):
                    await self._move()
                    self._succeed(clock.now() - started_at)
                self.fail(
                    DeadlineError(f"no more than {self._confirmed} blocks were moved in time")
                )
            except TrinamoError as error:
                self.fail(error)
            await self._land()
        self.settle()

    async def _land(self) -> None:
        """What was on its way goes on landing, long after anybody wants it."""
        if self._report is None and self._faults.lands_late:
            with suppress(TrinamoError):
                for position in range(self._moved, len(self._plan.local_blocks)):
                    await trio.sleep(self._faults.block_s)
                    self._copy(position, self._plane.reach(self._plan))

    async def _move(self) -> None:
        faults, plan = self._faults, self._plan
        if faults.is_unreachable:
            raise ConnectError("the fabric lets nobody through")
        remote = self._plane.reach(plan)
        target = plan.direction is Direction.WRITE
        remote.access.admit(
            plan.there.generation, plan.ticket, plan.remote_blocks, is_target=target
        )
        for position in range(len(plan.local_blocks)):
            if position == faults.breaks_after:
                raise DisconnectedError("the fabric broke the connection")
            if position == faults.stalls_after:
                await trio.sleep_forever()
            await trio.sleep(faults.block_s)
            self._check(remote)
            self._copy(position, remote)
            self._moved = position + 1
            if not self.is_over:
                self._confirmed = position + 1

    def _check(self, remote: HostRegion) -> None:
        if not remote.access.is_open_to(self._plan.there.generation, self._plan.ticket):
            raise StaleMemoryError("the blocks were withdrawn while they moved")
        if self.local.access.is_withdrawn:
            raise StaleMemoryError("the region was deregistered")

    def _copy(self, position: int, remote: HostRegion) -> None:
        ours = self.local.block(self._plan.local_blocks[position])
        theirs = remote.block(self._plan.remote_blocks[position])
        source, target = (
            (ours, theirs) if self._plan.direction is Direction.WRITE else (theirs, ours)
        )
        sent = zlib.crc32(source)
        target[:] = source
        if position == self._faults.corrupts:
            target[0] ^= 1
        if zlib.crc32(target) != sent:
            raise CorruptedError(f"the checksum of block {position} of the transfer does not match")

    def _succeed(self, duration_s: float) -> None:
        plan = self._plan
        if self.is_over:
            return
        if plan.notify is not None:
            self._plane.reach(plan).access.complete(plan.ticket, plan.notify)
        self.succeed(
            TransferReport(
                backend=self._plane.backend,
                path="memory",
                direction=plan.direction,
                block_count=plan.block_count,
                byte_count=plan.byte_count,
                duration_s=duration_s,
                is_verified=True,
            )
        )


class MemoryTransferPlane:
    """Implements `TransferPlane` and `SettlementPlane`; made by `open_memory_transfer_plane`."""

    def __init__(
        self,
        fabric: TransferFabric,
        env: Env,
        nursery: trio.Nursery,
        backend: str,
        address: str | None,
    ) -> None:
        self.backend: Final = backend
        self.env = env
        self.incarnation = draw_incarnation(env.rng)
        self.address = address or f"memory-{self.incarnation}"
        self.faults = TransferFaults()
        self._fabric, self._nursery = fabric, nursery
        self._regions: dict[int, HostRegion] = {}
        self._numbers = 0
        self._forgotten: dict[str, None] = {}
        self._transfers: dict[int, MemoryTransfer] = {}
        self._answers = Answers()
        fabric.planes[self.incarnation] = self
        fabric.listeners[self.address] = self

    async def register(
        self,
        memory: Registrable,
        *,
        block_bytes: int,
        fingerprint: str = "",
        needs_ticket: bool = False,
        parts: int = 1,
    ) -> HostRegion:
        await trio.lowlevel.checkpoint()
        views = host_buffers(memory, block_bytes, backend="the memory plane")
        length = sum(view.nbytes for view in views)
        check_parts(length // block_bytes, parts)
        self._numbers += 1
        description = MemoryDescription(
            backend=self.backend,
            incarnation=self.incarnation,
            region=self._numbers,
            generation=1,
            fingerprint=fingerprint,
            length=length,
            block_bytes=block_bytes,
            parts=parts,
        )
        region = HostRegion(views, description, needs_ticket=needs_ticket, is_fenced=True)
        self._regions[self._numbers] = region
        return region

    async def deregister(self, region: MemoryRegion) -> None:
        await trio.lowlevel.checkpoint()
        known = self._regions.pop(region.description.region, None)
        if known is not None:
            known.withdraw()
            ours = [t for t in self._transfers.values() if t.local is known]
            for transfer in ours:
                transfer.fail(StaleMemoryError("the region was deregistered"))
            for transfer in ours:
                await transfer.wait_settled()

    async def connect(self, description: bytes) -> RemoteRegion:
        await trio.lowlevel.checkpoint()
        described = decode_description(description, backend=self.backend)
        self._forgotten.pop(described.incarnation, None)
        self._peer(described.incarnation)
        return RemoteRegion(described)

    async def probe(self, remote: RemoteMemory) -> None:
        await trio.lowlevel.checkpoint()
        self._peer(remote.description.incarnation)

    async def forget(self, incarnation: str) -> None:
        self._forgotten[incarnation] = None
        theirs = [t for t in self._transfers.values() if t.peer == incarnation]
        for transfer in theirs:
            transfer.fail(DisconnectedError(f"peer {incarnation} was forgotten"))
        for transfer in theirs:
            await transfer.wait_settled()
        await trio.lowlevel.checkpoint()

    def _peer(self, incarnation: str) -> MemoryTransferPlane:
        peer = self._fabric.planes.get(incarnation)
        if self.faults.is_unreachable or peer is None or incarnation in self._forgotten:
            raise ConnectError(f"nobody answers as {incarnation}")
        return peer

    def reach(self, plan: _Plan) -> HostRegion:
        """The peer's region; what is missing is a typed error."""
        peer = self._peer(plan.there.incarnation)
        region = peer._regions.get(plan.there.region)  # noqa: SLF001 -- the same class
        if region is None:
            raise StaleMemoryError(f"there is no region {plan.there.region}")
        return region

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
    ) -> MemoryTransfer:
        assert isinstance(local, HostRegion), "memory of another plane"
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
        transfer = MemoryTransfer(self, plan)
        self._transfers[id(transfer)] = transfer
        self._nursery.start_soon(self._drive, transfer)
        return transfer

    async def _drive(self, transfer: MemoryTransfer) -> None:
        try:
            await transfer.drive()
        finally:
            del self._transfers[id(transfer)]

    def answering(self, is_settled: IsSettled) -> AbstractContextManager[None]:
        return self._answers.answering(is_settled)

    async def inquire(
        self, address: str, incarnation: str, ticket: int, *, timeout_s: float
    ) -> InquiryReport:
        await trio.lowlevel.checkpoint()
        peer = self._fabric.listeners.get(address)
        if self.faults.is_unreachable:
            await trio.sleep(timeout_s)
            return InquiryReport(InquiryResult.UNREACHED)
        if peer is None:
            return InquiryReport(InquiryResult.REFUSED)
        if peer.faults.is_frozen:
            await trio.sleep(timeout_s)
            return InquiryReport(InquiryResult.SILENT, address)
        if peer.incarnation != incarnation:
            return InquiryReport(InquiryResult.REPLACED, address)
        is_settled = peer._answers.is_settled(ticket)  # noqa: SLF001 -- the same class
        return InquiryReport(
            InquiryResult.SAYS_SETTLED if is_settled else InquiryResult.SAYS_MOVING, address
        )

    def close(self) -> None:
        """Nobody reaches it any more; its transfers end, wherever they are."""
        self._fabric.planes.pop(self.incarnation, None)
        if self._fabric.listeners.get(self.address) is self:
            del self._fabric.listeners[self.address]
        for region in self._regions.values():
            region.withdraw()
        for transfer in list(self._transfers.values()):
            transfer.abort()


@asynccontextmanager
async def open_memory_transfer_plane(
    fabric: TransferFabric,
    env: Env | None = None,
    *,
    backend: str = "memory",
    address: str | None = None,
) -> AsyncIterator[MemoryTransferPlane]:
    """A plane on `fabric`, until the block is left. `backend` lets a test make two kinds.

    `address` is where it is asked; None makes one up. The last to have opened one is found there.
    """
    env = RealEnv() if env is None else env
    async with open_nursery() as nursery:
        plane = MemoryTransferPlane(fabric, env, nursery, backend, address)
        try:
            yield plane
        finally:
            plane.close()
            nursery.cancel_scope.cancel()
