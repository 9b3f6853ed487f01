"""What every transfer plane must do, whatever moves the bytes."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from tests.conformance.transfer.backends import (
    BLOCKS,
    Pages,
)
from tests.conformance.transfer.ends import DEADLINE_S, READ, WRITE, Ends, Granted, scattered
from trinamo.runtime.errors import (
    RequestError,
    StaleMemoryError,
)
from trinamo.runtime.protocol.transfer.description import (
    Direction,
)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("count", [1, 2, 37, BLOCKS])
async def test_scattered_blocks_arrive_where_they_should(
    ends: Ends, direction: Direction, count: int
) -> None:
    await ends.move(direction, scattered(count, 3), scattered(count, 4))


@pytest.mark.parametrize("direction", Direction)
async def test_neighbours_on_one_side_only_arrive_where_they_should(
    ends: Ends, direction: Direction
) -> None:
    await ends.move(direction, [5, 6, 7, 8, 9], [20, 21, 40, 41, 3])
    await ends.move(direction, [12, 11, 10], [0, 1, 2])
    await ends.move(direction, list(range(BLOCKS)), list(range(BLOCKS)))


def shapes(count: int) -> dict[str, tuple[list[int], list[int]]]:
    """Lists of all blocks, by how they lie on the two sides."""
    row, mixed = list(range(count)), random.Random(11).sample(range(count), count)
    return {
        "a row each": (row, row),
        "a row here": (row, mixed),
        "a row there": (mixed, row),
        "backwards": (row[::-1], row),
        "every other one": (row[::2] + row[1::2], mixed),
    }


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("block_bytes", [1, 8, 1000, 1024, 1025, 16384, 1 << 20])
async def test_blocks_of_any_size_move_however_they_lie(
    ends: Ends, direction: Direction, block_bytes: int
) -> None:
    """Thousands of small ones too: neither their sums nor their addresses are too many."""
    count = max(3, min(2500 if block_bytes == 1 else 300, (3 << 20) // block_bytes))
    here, there = (Pages(seed, count, block_bytes) for seed in (1, 2))
    local = await ends.ours.register(here.memory, block_bytes=block_bytes)
    owned = await ends.theirs.register(there.memory, block_bytes=block_bytes)
    remote = await ends.ours.connect(owned.describe())
    for name, (ours, theirs) in shapes(count).items():
        if direction is READ:
            for a, b in zip(ours, theirs, strict=True):
                here.expect(a, there.block(b))
        else:
            for a, b in zip(ours, theirs, strict=True):
                there.expect(b, here.block(a))
        await ends.ours.start(direction, local, ours, remote, theirs, deadline_s=DEADLINE_S).wait()
        assert here.memory == here.expected, name
        assert there.memory == there.expected, name
        target = here if direction is READ else there
        target.memory[:] = target.expected[:] = random.Random(name).randbytes(len(target.memory))


@pytest.mark.parametrize("direction", Direction)
async def test_no_blocks_are_moved_at_once(ends: Ends, direction: Direction) -> None:
    await ends.move(direction, [], [])


@pytest.mark.parametrize("direction", Direction)
async def test_transfers_side_by_side_do_not_mix(ends: Ends, direction: Direction) -> None:
    pairs = list(zip(scattered(BLOCKS, 5), scattered(BLOCKS, 6), strict=True))
    async with trio.open_nursery() as nursery:
        for start in range(0, BLOCKS, 8):
            part = pairs[start : start + 8]
            for a, b in part:
                if direction is READ:
                    ends.here.expect(a, ends.there.block(b))
                else:
                    ends.there.expect(b, ends.here.block(a))
            transfer = ends.start(direction, [a for a, _ in part], [b for _, b in part])
            nursery.start_soon(transfer.wait)
    ends.check()


async def test_one_block_may_be_sent_to_many_places(ends: Ends) -> None:
    await ends.move(WRITE, [7, 7, 7], [1, 2, 3])
    await ends.move(READ, [1, 2, 3], [9, 9, 9])


async def test_both_sides_may_start_transfers(ends: Ends) -> None:
    back = await ends.theirs.connect(ends.local.describe())
    ends.there.expect(4, ends.here.block(5))
    await ends.theirs.start(READ, ends.owned, [4], back, [5], deadline_s=DEADLINE_S).wait()
    ends.check()
    await ends.move(WRITE, [1], [2])


async def test_a_tail_shorter_than_a_block_is_left_out(ends: Ends) -> None:
    memory = bytearray(10 * 100 + 7)
    region = await ends.ours.register(memory, block_bytes=100)
    assert region.description.block_count == 10


@pytest.mark.parametrize("direction", Direction)
async def test_who_granted_blocks_is_told_when_and_only_when_the_transfer_is_done(
    granted: Granted, direction: Direction
) -> None:
    await granted.move(direction, [1, 2])
    for number in range(3):
        await granted.move(direction, [1 + number], notify=b"done %d" % number)
    assert await granted.hears(b"done 0", b"done 1", b"done 2")


@pytest.mark.parametrize("direction", Direction)
async def test_a_grant_is_completed_by_its_own_ticket_only(
    granted: Granted, direction: Direction
) -> None:
    """Not by another one, none, or one that was revoked; not without blocks either."""
    await granted.move(direction, [4], ticket=78, notify=b"of another grant")
    for ticket in (0, 79):
        for blocks in ([1], []):
            with pytest.raises((StaleMemoryError, RequestError)):
                await granted.move(direction, blocks, ticket=ticket, notify=b"forged")
    granted.owned.revoke(77)
    with pytest.raises(StaleMemoryError):
        await granted.move(direction, [], notify=b"too late")
    assert await granted.hears()


async def test_a_failed_transfer_tells_nobody(granted: Granted) -> None:
    granted.owned.renew()
    with pytest.raises(StaleMemoryError):
        await granted.move(WRITE, [1], notify=b"never")
    assert await granted.hears()
