"""A withdrawn grant frees its blocks when its peer has proven that it let go, and not before."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from trinamo.runtime.errors import StaleMemoryError
from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.kv.transfer.grants import Grant
from trinamo.runtime.kv.transfer.leases import BlockLeases, open_block_leases
from trinamo.runtime.kv.transfer.settlement import Inquiries
from trinamo.runtime.planes import MemoryRegion, Transfer
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.runtime.protocol.transfer.settlement import PeerDescriptor, PeerStatus
from trinamo.transports.memory.transfer import (
    MemoryTransferPlane,
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
    plane: MemoryTransferPlane
    region: Any
    statuses: list[PeerStatus]
    evicted: list[PeerDescriptor]
    lost: list[int]
    nursery: trio.Nursery
    moving: set[int] = attrs.field(factory=set)
    """The tickets the peer says that it moves."""
    peer: MemoryTransferPlane = attrs.field(init=False)
    _life: trio.CancelScope = attrs.field(init=False)

    async def be_born(self, *, answers: bool = True) -> None:
        self._life = await self.nursery.start(self._live, answers)

    async def _live(self, answers: bool, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with trio.CancelScope() as life:
            async with open_memory_transfer_plane(self.fabric, address=HERE) as self.peer:
                says = self.peer.answering(lambda ticket: ticket not in self.moving)
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


@pytest.fixture
async def house() -> AsyncIterator[House]:
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
        inquiries = Inquiries(plane, timeout_s=1.0, on_status=statuses.append, on_gone=evict)
        async with (
            trio.open_nursery() as nursery,
            open_block_leases(
                pool,
                drain_s=DRAIN_S,
                on_quarantine=count(1),
                on_readmit=count(-1),
                dice=random.Random(1),
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


async def test_a_peer_that_has_settled_says_so_and_the_blocks_are_free(
    house: House, autojump_clock: MockClock
) -> None:
    grant = await house.lend()
    house.moving.clear()
    grant.withdraw()
    assert house.counts() == IN_FLIGHT
    await house.leases.drain()
    assert house.counts() == FREE
    assert house.statuses == [PeerStatus.SETTLED]
    assert not house.evicted


async def test_what_may_be_in_a_buffer_has_time_to_land_after_the_proof(
    house: House, autojump_clock: MockClock
) -> None:
    grant = await house.lend()
    house.moving.clear()
    grant.withdraw()
    await trio.sleep(0.4)
    assert house.statuses == [PeerStatus.SETTLED]
    assert house.counts() == IN_FLIGHT
    await trio.sleep(0.2)
    assert house.counts() == FREE


async def test_blocks_lent_for_long_are_free_soon_after_the_peer_has_settled(
    house: House, autojump_clock: MockClock
) -> None:
    """The path was seen to work all the while, so nothing can have been kept back."""
    grant = await house.lend()
    await trio.sleep(600)
    house.moving.clear()
    grant.withdraw()
    left_at = trio.current_time()
    await house.leases.drain()
    assert trio.current_time() - left_at < 4
    assert house.counts() == FREE


async def test_a_peer_that_dies_with_blocks_of_ours_ends_its_grant(
    house: House, autojump_clock: MockClock
) -> None:
    grant = await house.lend()
    await trio.sleep(60)
    await house.die()
    await trio.sleep(8)
    with pytest.raises(StaleMemoryError):
        await grant.completed()
    assert house.counts() == FREE


async def test_a_freeze_of_our_own_does_not_end_the_rest_after_the_proof(
    house: House, mock_clock: MockClock
) -> None:
    """What lies in our buffers has had no time to land, however late it is when we wake."""
    grant = await house.lend()
    house.moving.clear()
    grant.withdraw()
    await trio.testing.wait_all_tasks_blocked()
    assert house.statuses == [PeerStatus.SETTLED]
    mock_clock.jump(3600)
    await trio.testing.wait_all_tasks_blocked()
    assert house.counts() == IN_FLIGHT
    for _ in range(10):
        mock_clock.jump(0.05)
        await trio.testing.wait_all_tasks_blocked()
    assert house.counts() == FREE


async def test_a_peer_that_still_moves_is_asked_until_it_has_settled(
    house: House, autojump_clock: MockClock
) -> None:
    grant = await house.lend()
    grant.withdraw()
    await trio.sleep(4)
    assert house.counts() == IN_FLIGHT
    assert 4 <= len(house.statuses) <= 10, "at growing intervals of a second at most"
    house.moving.clear()
    await house.leases.drain()
    assert house.counts() == FREE
    assert set(house.statuses) == {PeerStatus.MOVING, PeerStatus.SETTLED}


async def test_a_dead_peer_costs_no_block(house: House, autojump_clock: MockClock) -> None:
    writer = house.writer
    grant = await house.lend()
    await house.die()
    grant.withdraw()
    await house.leases.drain()
    assert house.counts() == FREE
    assert house.statuses == [PeerStatus.GONE]
    assert house.evicted == [writer]
    assert house.lost == [0]


async def test_another_life_at_the_address_is_the_death_of_the_first(
    house: House, autojump_clock: MockClock
) -> None:
    grant = await house.lend()
    await house.die()
    await house.be_born()
    grant.withdraw()
    await house.leases.drain()
    assert house.counts() == FREE
    assert house.statuses == [PeerStatus.GONE]


async def test_a_frozen_peer_is_not_taken_for_dead_however_long_it_stands(
    house: House, autojump_clock: MockClock
) -> None:
    grant = await house.lend()
    house.peer.faults.is_frozen = True
    grant.withdraw()
    await trio.sleep(DRAIN_S - 0.1)
    assert house.counts() == IN_FLIGHT
    await house.leases.drain()
    assert house.counts() == QUARANTINED
    asked = len(house.statuses)
    await trio.sleep(3600)
    assert house.counts() == QUARANTINED
    assert set(house.statuses) == {PeerStatus.UNKNOWN}
    assert 100 <= len(house.statuses) - asked <= 130, "about every 30 s"
    house.peer.faults.is_frozen = False
    await trio.sleep(60)
    assert house.statuses[-1] is PeerStatus.MOVING
    assert house.counts() == QUARANTINED, "it woke, and writes"
    house.moving.clear()
    await trio.sleep(70)
    assert house.counts() == FREE
    assert house.lost == [0]


async def test_a_frozen_peer_that_is_killed_gives_the_blocks_back(
    house: House, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    grant = await house.lend()
    house.peer.faults.is_frozen = True
    grant.withdraw()
    await trio.sleep(60)
    assert house.counts() == QUARANTINED
    await house.die()
    await trio.sleep(90)
    assert house.counts() == FREE
    assert "4 blocks leave quarantine" in caplog.text


async def test_many_grants_of_a_frozen_peer_ask_it_one_at_a_time(
    house: House, autojump_clock: MockClock
) -> None:
    grants = [await house.lend(1) for _ in range(BLOCKS)]
    house.peer.faults.is_frozen = True
    for grant in grants:
        grant.withdraw()
    await trio.sleep(20.5)
    assert len(house.statuses) == 20, "each takes a second"
    house.peer.faults.is_frozen = False
    house.moving.clear()
    await trio.sleep(70)
    assert house.counts() == FREE
    assert house.leases._inquiries is not None
    assert not house.leases._inquiries._paths


async def test_after_a_cut_link_the_blocks_rest_as_long_as_it_was_cut(
    house: House, autojump_clock: MockClock
) -> None:
    """A kernel that could not send waits about as long again before it tries once more."""
    grant = await house.lend()
    house.plane.faults.is_unreachable = True
    grant.withdraw()
    await trio.sleep(60)
    assert house.counts() == QUARANTINED
    await house.die()
    house.plane.faults.is_unreachable = False
    with trio.fail_after(40):
        while PeerStatus.GONE not in house.statuses:
            await trio.sleep(0.1)
    await trio.sleep(59)
    assert house.counts() == QUARANTINED
    await trio.sleep(60)
    assert house.counts() == FREE


async def test_a_life_that_answers_is_met_and_stays_so_after_its_death(
    house: House, autojump_clock: MockClock
) -> None:
    writer = house.writer
    assert await house.leases.meet(writer)
    await house.die()
    assert await house.leases.meet(writer)
    grant = await house.lend(writer=writer)
    grant.withdraw()
    await trio.sleep(1)
    assert house.counts() == FREE


async def test_a_life_that_has_ended_before_it_was_met_is_known_before_anything_is_granted(
    house: House, autojump_clock: MockClock
) -> None:
    writer = house.writer
    await house.die()
    assert not await house.leases.meet(writer)
    await house.be_born()
    assert not await house.leases.meet(writer), "another life is there now"
    assert await house.leases.meet(house.writer)


async def test_a_life_that_was_never_met_cannot_be_proven_dead(
    house: House, autojump_clock: MockClock
) -> None:
    """Its address may be ours: 127.0.0.1, told by another host."""
    stranger = PeerDescriptor("peer", "127.0.0.1:9", "ff")
    grant = await house.lend(writer=stranger)
    grant.withdraw()
    await trio.sleep(600)
    assert house.counts() == QUARANTINED
    assert set(house.statuses) == {PeerStatus.UNKNOWN}
    grant.settle()
    await trio.sleep(1)
    assert house.counts() == FREE


async def test_a_peer_that_nobody_answers_for_is_moving(
    house: House, autojump_clock: MockClock
) -> None:
    await house.die()
    await house.be_born(answers=False)
    grant = await house.lend()
    grant.withdraw()
    await trio.sleep(DRAIN_S + 1)
    assert house.counts() == QUARANTINED
    await house.die()
    await trio.sleep(60)
    assert house.counts() == FREE


async def test_the_writer_s_own_word_ends_the_questions(
    house: House, autojump_clock: MockClock
) -> None:
    grant = await house.lend()
    grant.withdraw()
    await trio.sleep(0.2)
    grant.settle()
    with trio.fail_after(0.1):
        await house.leases.drain()
    assert house.counts() == FREE
    asked = len(house.statuses)
    await trio.sleep(10)
    assert len(house.statuses) == asked


async def test_shutdown_does_not_wait_for_what_is_in_quarantine(
    house: House, autojump_clock: MockClock
) -> None:
    grant = await house.lend()
    house.peer.faults.is_frozen = True
    grant.withdraw()
    await trio.sleep(DRAIN_S + 1)
    with trio.fail_after(0.001):
        await house.leases.drain()
    assert house.counts() == QUARANTINED


async def test_a_fenced_grant_asks_nobody(house: House, autojump_clock: MockClock) -> None:
    house.region.is_fenced = True
    grant = await house.lend()
    grant.withdraw()
    assert house.counts() == FREE
    await trio.sleep(10)
    assert not house.statuses


async def test_closing_ends_every_question() -> None:
    fabric, pool = TransferFabric(), BlockPool(4)
    async with (
        open_memory_transfer_plane(fabric) as plane,
        open_memory_transfer_plane(fabric, address=HERE) as peer,
    ):
        region: Any = Unfenced(
            await plane.register(bytearray(64), block_bytes=16, needs_ticket=True)
        )
        writer = PeerDescriptor("peer", HERE, peer.incarnation)
        peer.faults.is_frozen = True
        tasks = trio.lowlevel.current_statistics().tasks_living
        async with open_block_leases(
            pool, drain_s=0.05, dice=random.Random(1), inquiries=Inquiries(plane)
        ) as leases:
            for block in pool.take(3) or ():
                leases.grant(region, [block], writer).withdraw()
            await trio.sleep(0.2)
            assert pool.quarantined_count == 3
            pool.take(1)
            leases.grant(region, [3], writer).withdraw()
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        assert pool.quarantined_count == 4


# --- when we are asked -----------------------------------------------------------------------------


async def test_a_ticket_moves_from_its_transfer_s_start_until_it_is_settled(
    house: House, autojump_clock: MockClock
) -> None:
    theirs = await house.peer.register(bytearray(64), block_bytes=16)
    remote = await house.plane.connect(theirs.describe())
    house.plane.faults.block_s = 1
    house.plane.faults.lands_late = True
    tickets = house.leases.tickets

    def start(ticket: int) -> Any:
        blocks = house.pool.take(2)
        assert blocks is not None

        def begin() -> Transfer:
            return house.plane.start(
                *(Direction.READ, house.region._region, blocks, remote, [0, 1]),
                deadline_s=99,
                ticket=ticket,
            )

        return house.leases.start(begin, blocks, ticket)

    assert tickets.is_settled(7)
    first = start(7)
    assert not tickets.is_settled(7)
    second = start(7)
    other = start(8)
    first.abort()
    assert not tickets.is_settled(7), "it is over, but lands"
    await first.wait_settled()
    await second.wait_settled()
    await other.wait_settled()
    await trio.testing.wait_all_tasks_blocked()
    assert tickets.is_settled(7)
    assert tickets.is_settled(8)


async def test_a_transfer_that_never_settles_says_moving_for_ever(
    house: House, autojump_clock: MockClock
) -> None:
    theirs = await house.peer.register(bytearray(64), block_bytes=16)
    remote = await house.plane.connect(theirs.describe())
    house.plane.faults.stalls_after = 0
    house.plane.faults.lands_late = True
    blocks = house.pool.take(1)
    assert blocks is not None
    house.leases.start(
        lambda: house.plane.start(
            Direction.READ, house.region._region, blocks, remote, [0], deadline_s=9999, ticket=7
        ),
        blocks,
        7,
    ).abort()
    await trio.sleep(600)
    assert house.pool.quarantined_count == 1
    assert not house.leases.tickets.is_settled(7)
