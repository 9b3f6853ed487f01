"""A process whose memory two backends have registered, and a peer's."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio
import trio.testing

from trinamo.runtime.config.planes import TransferConfig
from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.kv.transfer.leases import BlockLeases, open_block_leases
from trinamo.runtime.kv.transfer.metrics import TransferMetrics
from trinamo.runtime.kv.transfer.router import TransferRouter, open_transfer_router
from trinamo.runtime.kv.transfer.routes import RoutedMemory, RoutedPeer
from trinamo.runtime.metrics.tallies import Registry
from trinamo.runtime.planes import TransferPlane
from trinamo.runtime.protocol.transfer.description import (
    Direction,
)
from trinamo.transports.memory.transfer import (
    MemoryMover,
    TransferFabric,
    open_memory_transfer_plane,
)

Clock = trio.testing.MockClock
READ, WRITE = Direction.READ, Direction.WRITE
BLOCKS, SIZE = 16, 32
FAULTY = [{"breaks_after": 5}, {"corrupts": 5}, {"stalls_after": 5}, {"is_unreachable": True}]


@attrs.define
class House:
    """Two processes with the backends `fast` and `slow`, and a router in the first one."""

    fast: TransferPlane[MemoryMover]
    slow: TransferPlane[MemoryMover]
    other: TransferRouter
    """The peer's."""
    router: TransferRouter
    leases: BlockLeases
    pool: BlockPool
    metrics: TransferMetrics
    registry: Registry
    here: bytearray
    there: bytearray
    local: RoutedMemory
    owned: RoutedMemory
    peer: RoutedPeer
    heard: list[bytes]
    """What the peer was told by those who have ticket 7."""

    async def move(
        self, direction: Direction, deadline_s: float = 60, notify: bytes | None = None
    ) -> list[str]:
        blocks = list(range(BLOCKS))
        back = blocks[::-1]
        reports = await self.router.move(
            direction,
            self.local,
            blocks,
            self.peer,
            back,
            deadline_s=deadline_s,
            notify=notify,
            ticket=7,
        )
        for a, b in zip(blocks, back, strict=True):
            ours, theirs = (
                self.here[a * SIZE : (a + 1) * SIZE],
                self.there[b * SIZE : (b + 1) * SIZE],
            )
            assert ours == theirs
        assert sum(report.block_count for report in reports) <= BLOCKS
        return [report.backend for report in reports]


@asynccontextmanager
async def open_house() -> AsyncIterator[House]:
    fabric, pool = TransferFabric(), BlockPool(BLOCKS)
    pool.take(BLOCKS)
    registry = Registry()
    metrics = TransferMetrics(registry)
    here = bytearray(random.Random(1).randbytes(BLOCKS * SIZE))
    there = bytearray(random.Random(2).randbytes(BLOCKS * SIZE))
    async with (
        open_memory_transfer_plane(fabric, backend="fast") as fast,
        open_memory_transfer_plane(fabric, backend="slow") as slow,
        open_memory_transfer_plane(fabric, backend="fast") as fast_there,
        open_memory_transfer_plane(fabric, backend="slow") as slow_there,
        open_block_leases(pool, rng=random.Random(1), on_quarantine=metrics.quarantined) as leases,
        open_transfer_router(
            [fast, slow], metrics=metrics, leases=leases, section=TransferConfig()
        ) as router,
        open_transfer_router(
            [slow_there, fast_there], metrics=TransferMetrics(Registry())
        ) as other,
    ):
        local = await router.register(here, block_bytes=SIZE)
        owned = await other.register(there, block_bytes=SIZE, needs_ticket=True)
        heard: list[bytes] = []
        owned.grant(7, range(BLOCKS), heard.append)
        peer = await router.connect(owned.describe())
        while len(peer.usable) < 2:
            # It goes on with the first; the other answers, too.
            await trio.lowlevel.checkpoint()
        yield House(
            *(fast, slow, other, router, leases, pool, metrics, registry),
            *(here, there, local, owned, peer, heard),
        )
