"""Somebody who lends blocks without a fence to a peer that may hang, die and come back."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import attrs
import trio
import trio.testing

from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.kv.transfer.leases import BlockLeases, open_block_leases
from trinamo.runtime.kv.transfer.settlement import Grant, Inquiries
from trinamo.runtime.planes import MemoryRegion, TransferPlane
from trinamo.runtime.protocol.transfer.settlement import PeerDescriptor, PeerStatus
from trinamo.transports.memory.transfer import (
    MemoryMover,
    TransferFabric,
    open_memory_transfer_plane,
)

BLOCKS = 8
DRAIN_S = 5.0
HERE = "the peer's"


class Unfenced:
    """A region as RDMA has it: the owner cannot stop who knows the address."""

    is_fenced = False

    def __init__(self, region: MemoryRegion) -> None:
        self._region = region

    def __getattr__(self, name: str) -> Any:
        return getattr(self._region, name)


@attrs.define
class House:
    """A pool whose blocks a peer may write, and the peer."""

    fabric: TransferFabric
    pool: BlockPool
    leases: BlockLeases
    plane: TransferPlane[MemoryMover]
    region: Any
    statuses: list[PeerStatus]
    evicted: list[PeerDescriptor]
    lost: list[int]
    nursery: trio.Nursery
    moving: set[int] = attrs.field(factory=set)
    """The tickets the peer says that it moves."""
    peer: TransferPlane[MemoryMover] = attrs.field(init=False)
    _life: trio.CancelScope = attrs.field(init=False)

    async def be_born(self, *, answers: bool = True) -> None:
        self._life = await self.nursery.start(self._live, answers)

    async def _live(self, answers: bool, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with trio.CancelScope() as life:
            async with open_memory_transfer_plane(self.fabric, address=HERE) as self.peer:
                says = self.peer.mover.answering(lambda ticket: ticket not in self.moving)
                with says if answers else nullcontext():
                    task_status.started(life)
                    await trio.sleep_forever()

    async def die(self) -> None:
        self._life.cancel()
        await trio.testing.wait_all_tasks_blocked()

    @property
    def writer(self) -> PeerDescriptor:
        return PeerDescriptor("peer", HERE, self.peer.incarnation)

    async def lend(self, count: int = 4, writer: PeerDescriptor | None = None) -> Grant:
        """Grant blocks that their owner has given back already; the peer begins to move."""
        blocks = self.pool.take(count)
        assert blocks is not None
        if writer is None:
            assert await self.leases.meet(self.writer)
        grant = self.leases.grant(self.region, blocks, writer or self.writer)
        self.moving.add(grant.ticket)
        self.pool.give_back(blocks)
        await trio.testing.wait_all_tasks_blocked()
        return grant

    def counts(self) -> tuple[int, int, int, int]:
        pool = self.pool
        found = (pool.free_count, pool.used_count, pool.in_flight_count, pool.quarantined_count)
        assert sum(found) == BLOCKS
        return found


FREE, IN_FLIGHT, QUARANTINED = (8, 0, 0, 0), (4, 0, 4, 0), (4, 0, 0, 4)


@asynccontextmanager
async def open_house() -> AsyncIterator[House]:
    fabric, pool = TransferFabric(), BlockPool(BLOCKS)
    statuses: list[PeerStatus] = []
    evicted: list[PeerDescriptor] = []
    lost = [0]

    async def evict(writer: PeerDescriptor) -> None:
        await trio.lowlevel.checkpoint()
        evicted.append(writer)

    def count(sign: int) -> Callable[[int], None]:
        def change(blocks: int) -> None:
            lost[0] += sign * blocks

        return change

    async with open_memory_transfer_plane(fabric) as plane:
        inquiries = Inquiries(plane.mover, timeout_s=1.0, on_status=statuses.append, on_gone=evict)
        async with (
            trio.open_nursery() as nursery,
            open_block_leases(
                pool,
                drain_s=DRAIN_S,
                on_quarantine=count(1),
                on_readmit=count(-1),
                rng=random.Random(1),
                inquiries=inquiries,
            ) as leases,
        ):
            region = await plane.register(bytearray(BLOCKS * 16), block_bytes=16, needs_ticket=True)
            found = House(
                fabric, pool, leases, plane, Unfenced(region), statuses, evicted, lost, nursery
            )
            await found.be_born()
            yield found
            nursery.cancel_scope.cancel()
