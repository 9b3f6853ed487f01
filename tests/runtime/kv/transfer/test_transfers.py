"""Blocks that move are leased until their transfer is settled, and quarantined if it never is."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from trinamo.runtime.errors import KilledError, TransferError
from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.kv.transfer.leases import BlockLeases, open_block_leases
from trinamo.runtime.planes import MemoryRegion, RemoteMemory, Transfer, TransferPlane
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.transports.memory.transfer import (
    MemoryMover,
    TransferFabric,
    open_memory_transfer_plane,
)

BLOCKS = 8


@attrs.define
class House:
    """A pool of 8 blocks, registered with a plane that knows a peer."""

    pool: BlockPool
    leases: BlockLeases
    plane: TransferPlane[MemoryMover]
    region: MemoryRegion
    remote: RemoteMemory
    memory: bytearray
    lost: list[int]

    def start(self, blocks: list[int], deadline_s: float = 60) -> Transfer:
        def start() -> Transfer:
            return self.plane.start(
                Direction.READ, self.region, blocks, self.remote, blocks, deadline_s=deadline_s
            )

        return self.leases.start(start, blocks)

    def counts(self) -> tuple[int, int, int, int]:
        pool = self.pool
        found = (pool.free_count, pool.used_count, pool.in_flight_count, pool.quarantined_count)
        assert sum(found) == BLOCKS
        return found

    def take(self, count: int) -> list[int]:
        taken = self.pool.take(count)
        assert taken is not None
        return taken


@pytest.fixture
async def house() -> AsyncIterator[House]:
    fabric, pool, lost = TransferFabric(), BlockPool(BLOCKS), list[int]()
    memory = bytearray(BLOCKS * 16)
    async with (
        open_memory_transfer_plane(fabric) as plane,
        open_memory_transfer_plane(fabric) as peer,
        open_block_leases(
            pool,
            drain_s=5,
            on_quarantine=lost.append,
            on_readmit=lambda count: lost.append(-count),
            rng=random.Random(1),
        ) as leases,
    ):
        region = await plane.register(memory, block_bytes=16, needs_ticket=True)
        theirs = await peer.register(bytearray(b"x" * BLOCKS * 16), block_bytes=16)
        remote = await plane.connect(theirs.describe())
        yield House(pool, leases, plane, region, remote, memory, lost)


async def test_blocks_are_in_flight_until_their_transfer_is_done(house: House) -> None:
    blocks = house.take(3)
    transfer = house.start(blocks)
    assert house.counts() == (5, 0, 3, 0)
    await transfer.wait()
    await house.leases.drain()
    assert house.counts() == (5, 3, 0, 0)
    house.pool.give_back(blocks)
    assert house.counts() == (8, 0, 0, 0)


async def test_a_block_given_back_in_flight_is_not_taken_before_it_has_landed(
    house: House, autojump_clock: trio.testing.MockClock
) -> None:
    house.plane.mover.faults.block_s = 1
    house.plane.mover.faults.lands_late = True
    blocks = house.take(3)
    transfer = house.start(blocks)
    transfer.abort()
    with pytest.raises(KilledError):
        await transfer.wait()
    house.pool.give_back(blocks)
    assert house.counts() == (5, 0, 3, 0)
    assert house.pool.take(6) is None
    await house.leases.drain()
    assert house.counts() == (8, 0, 0, 0)
    assert not house.lost


async def test_what_does_not_settle_in_time_is_not_used_again(
    house: House, autojump_clock: trio.testing.MockClock
) -> None:
    house.plane.mover.faults.stalls_after = 1
    house.plane.mover.faults.lands_late = True
    blocks = house.take(2)
    transfer = house.start(blocks, deadline_s=1000)
    transfer.abort()
    await house.leases.drain()
    assert house.lost == [2]
    assert house.counts() == (6, 0, 0, 2)
    house.pool.give_back(blocks)
    assert house.counts() == (6, 0, 0, 2)
    assert sorted(house.take(6) + blocks) == list(range(BLOCKS))


async def test_what_settles_late_leaves_quarantine(
    house: House, autojump_clock: trio.testing.MockClock
) -> None:
    house.plane.mover.faults.block_s = 10
    house.plane.mover.faults.lands_late = True
    blocks = house.take(2)
    transfer = house.start(blocks, deadline_s=1000)
    transfer.abort()
    house.pool.give_back(blocks)
    await house.leases.drain()
    assert house.counts() == (6, 0, 0, 2)
    await transfer.wait_settled()
    await trio.testing.wait_all_tasks_blocked()
    assert house.counts() == (8, 0, 0, 0)
    assert house.lost == [2, -2]


async def test_a_block_of_two_transfers_is_free_after_both(
    house: House, autojump_clock: trio.testing.MockClock
) -> None:
    house.plane.mover.faults.block_s = 1
    blocks = house.take(1)
    first = house.start(blocks)
    house.plane.mover.faults.block_s = 5
    house.start(blocks)
    house.pool.give_back(blocks)
    await first.wait()
    await trio.testing.wait_all_tasks_blocked()
    assert house.counts() == (7, 0, 1, 0)
    await house.leases.drain()
    assert house.counts() == (8, 0, 0, 0)


async def test_a_grant_that_is_fenced_frees_its_blocks_at_once(house: House) -> None:
    blocks = house.take(4)
    grant = house.leases.grant(house.region, blocks)
    assert house.counts() == (4, 0, 4, 0)
    house.pool.give_back(blocks)
    grant.withdraw()
    grant.withdraw()
    assert house.counts() == (8, 0, 0, 0)
    assert house.leases.in_flight_count == 0


class Unfenced:
    """A region as RDMA has it: the owner cannot stop who knows the address."""

    is_fenced = False

    def __init__(self, region: MemoryRegion) -> None:
        self._region = region

    def __getattr__(self, name: str) -> object:
        return getattr(self._region, name)


@pytest.mark.parametrize("says_so", [True, False])
async def test_blocks_of_a_grant_that_cannot_be_fenced_wait_for_the_writer_s_word(
    house: House, autojump_clock: trio.testing.MockClock, says_so: bool
) -> None:
    blocks = house.take(4)
    grant = house.leases.grant(Unfenced(house.region), blocks)  # type: ignore[arg-type]
    house.pool.give_back(blocks)
    grant.withdraw()
    await trio.sleep(4)
    assert house.counts() == (4, 0, 4, 0)
    if says_so:
        grant.settle()
    await house.leases.drain()
    assert house.counts() == ((8, 0, 0, 0) if says_so else (4, 0, 0, 4))


async def test_closing_quarantines_what_is_not_settled() -> None:
    fabric, pool = TransferFabric(), BlockPool(4)
    async with (
        open_memory_transfer_plane(fabric) as plane,
        open_memory_transfer_plane(fabric) as peer,
    ):
        plane.mover.faults.stalls_after = 0
        plane.mover.faults.lands_late = True
        region = await plane.register(bytearray(64), block_bytes=16)
        theirs = await peer.register(bytearray(64), block_bytes=16)
        remote = await plane.connect(theirs.describe())
        async with open_block_leases(pool, rng=random.Random(1)) as leases:
            pool.take(4)
            leases.start(
                lambda: plane.start(Direction.READ, region, [0], remote, [0], deadline_s=99), [0]
            )
        assert (pool.used_count, pool.quarantined_count) == (3, 1)


async def test_blocks_are_leased_before_their_transfer_starts(house: House) -> None:
    """Blocks that nobody owns are in no transfer, and leave nothing counted behind."""
    owned = house.take(2)
    free = next(b for b in range(BLOCKS) if b not in owned)

    def start() -> Transfer:
        raise AssertionError("it was started without a lease")

    with pytest.raises(AssertionError, match="was free"):
        house.leases.start(start, [*owned, free], ticket=9)
    assert house.leases.tickets.is_settled(9)
    assert house.counts() == (6, 2, 0, 0)


async def test_a_transfer_that_does_not_start_leaves_no_block_leased(house: House) -> None:
    def start() -> Transfer:
        raise TransferError("refused")

    with pytest.raises(TransferError, match="refused"):
        house.leases.start(start, house.take(2), ticket=9)
    assert house.leases.tickets.is_settled(9)
    assert house.counts() == (6, 2, 0, 0)
    with trio.fail_after(120):
        await house.leases.drain()


async def test_a_grant_that_the_region_refuses_leaves_no_block_leased(house: House) -> None:
    """Half of it may have been granted already, as by the first backend of several."""

    class Full:
        is_fenced = True

        def __init__(self) -> None:
            self.tickets: set[int] = set()

        def grant(
            self, ticket: int, blocks: object, on_complete: object, *, may_write: bool
        ) -> None:
            self.tickets.add(ticket)
            raise TransferError("as many tickets as there can be")

        def revoke(self, ticket: int) -> None:
            self.tickets.remove(ticket)

    full: Any = Full()
    blocks = house.take(2)
    with pytest.raises(TransferError, match="as many tickets"):
        house.leases.grant(full, blocks)
    assert not full.tickets
    assert house.counts() == (6, 2, 0, 0)
    with trio.fail_after(120):
        await house.leases.drain()


async def test_the_parts_of_a_block_lease_it_once(house: House) -> None:
    """As a layer-first layout registers them: part 3 of 4 blocks is of block 3, part 4 of block 0."""
    pool = BlockPool(4)
    taken = pool.take(4)
    assert taken is not None
    async with open_block_leases(pool, rng=random.Random(1), block_of=lambda p: p % 4) as leases:
        grant = leases.grant(house.region, [3, 7, 0, 4])
        assert grant.blocks == (3, 0)
        assert pool.in_flight_count == 2
        grant.withdraw()
        assert pool.in_flight_count == 0
