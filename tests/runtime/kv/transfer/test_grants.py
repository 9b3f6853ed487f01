"""A withdrawn grant frees its blocks when its peer has proven that it let go, and not before."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.runtime.kv.transfer.lenders import (
    BLOCKS,
    DRAIN_S,
    FREE,
    HERE,
    IN_FLIGHT,
    QUARANTINED,
    House,
    Unfenced,
    open_house,
)
from trinamo.runtime.errors import StaleMemoryError
from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.kv.transfer.leases import open_block_leases
from trinamo.runtime.kv.transfer.settlement import Inquiries
from trinamo.runtime.protocol.transfer.settlement import PeerDescriptor, PeerStatus
from trinamo.transports.memory.transfer import (
    TransferFabric,
    open_memory_transfer_plane,
)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with open_house() as found:
        yield found


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
    house.peer.mover.faults.is_frozen = True
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
    house.peer.mover.faults.is_frozen = False
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
    house.peer.mover.faults.is_frozen = True
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
    house.peer.mover.faults.is_frozen = True
    for grant in grants:
        grant.withdraw()
    await trio.sleep(20.5)
    assert len(house.statuses) == 20, "each takes a second"
    house.peer.mover.faults.is_frozen = False
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
    house.plane.mover.faults.is_unreachable = True
    grant.withdraw()
    await trio.sleep(60)
    assert house.counts() == QUARANTINED
    await house.die()
    house.plane.mover.faults.is_unreachable = False
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
    house.peer.mover.faults.is_frozen = True
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
        peer.mover.faults.is_frozen = True
        tasks = trio.lowlevel.current_statistics().tasks_living
        async with open_block_leases(
            pool, drain_s=0.05, rng=random.Random(1), inquiries=Inquiries(plane.mover)
        ) as leases:
            for block in pool.take(3) or ():
                leases.grant(region, [block], writer).withdraw()
            with trio.fail_after(120):
                while pool.quarantined_count < 3:
                    await trio.sleep(0.01)
            pool.take(1)
            leases.grant(region, [3], writer).withdraw()
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        assert pool.quarantined_count == 4
