"""Moves of several buffers, and of more blocks than one transfer takes, through a chain of backends."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio

from tests.runtime.kv.ranges import range_of
from tests.runtime.kv.transfer.engines import Village, cache
from tests.runtime.kv.transfer.routers import BLOCKS, SIZE, WRITE, Clock, House, open_house
from trinamo.runtime.errors import DisconnectedError
from trinamo.runtime.kv.memory import KvLayout
from trinamo.runtime.kv.transfer import router
from trinamo.runtime.planes import Transfer, TransferReport
from trinamo.runtime.protocol.transfer.description import Direction

PARTS, POOL = 3, 5


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with open_house() as found:
        yield found


async def test_a_move_falls_back_in_the_middle_of_a_layer(
    house: House, autojump_clock: Clock
) -> None:
    """The blocks of two layers are confirmed, and a part of the third; the word comes once."""
    here = [bytearray(random.Random(n).randbytes(POOL * SIZE)) for n in range(PARTS)]
    there = [bytearray(POOL * SIZE) for _ in range(PARTS)]
    local = await house.router.register(here, block_bytes=SIZE, parts=PARTS)
    owned = await house.other.register(there, block_bytes=SIZE, parts=PARTS, needs_ticket=True)
    heard: list[bytes] = []
    owned.grant(9, [3, 0], heard.append)
    peer = await house.router.connect(owned.describe())
    house.fast.mover.faults.breaks_after = 5
    ours, theirs = (
        [part * POOL + block for part in range(PARTS) for block in blocks]
        for blocks in ([1, 4], [3, 0])
    )
    reports = await house.router.move(
        *(WRITE, local, ours, peer, theirs), deadline_s=60, notify=b"all", ticket=9
    )
    assert [(each.backend, each.block_count) for each in reports] == [("slow", 1)]
    assert heard == [b"all"]
    for mine, other in zip(here, there, strict=True):
        assert other[3 * SIZE : 4 * SIZE] == mine[SIZE : 2 * SIZE]
        assert other[:SIZE] == mine[4 * SIZE :]
        assert not any(other[SIZE : 3 * SIZE])


@pytest.mark.parametrize("breaks_after", [None, 3])
async def test_more_blocks_than_one_transfer_takes_are_several_with_one_word_at_the_end(
    house: House,
    autojump_clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    breaks_after: int | None,
) -> None:
    monkeypatch.setattr(router, "BLOCKS_MAX", 5)
    house.fast.mover.faults.breaks_after = breaks_after
    backend = "fast" if breaks_after is None else "slow"
    assert await house.move(Direction.READ, notify=b"all") == [backend] * (
        BLOCKS // 5 + 1 - bool(breaks_after)
    )
    assert house.heard == [b"all"]


@pytest.mark.parametrize("blocks_max", [5, BLOCKS])
async def test_the_word_of_many_blocks_comes_though_the_backend_breaks_just_before_it(
    house: House, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch, blocks_max: int
) -> None:
    """All blocks are confirmed then, and nothing is left for the next backend but the word."""
    monkeypatch.setattr(router, "BLOCKS_MAX", blocks_max)
    start = house.fast.start

    def starts(*args: Any, notify: bytes | None = None, **options: Any) -> Transfer:
        transfer = start(*args, **options)
        if notify is not None:
            # Without the word it succeeds, and whoever asks hears of the broken connection.
            monkeypatch.setattr(transfer, "wait", partial(breaks, transfer.wait))
        return transfer

    async def breaks(wait: Callable[[], Awaitable[TransferReport]]) -> TransferReport:
        await wait()
        raise DisconnectedError("the fabric broke the connection")

    monkeypatch.setattr(house.fast, "start", starts)
    backends = await house.move(WRITE, notify=b"all")
    assert backends[-1] == "slow"
    assert house.heard == [b"all"]


async def test_a_block_is_in_quarantine_as_a_whole_while_any_part_of_it_may_be_written(
    autojump_clock: Clock,
) -> None:
    """A read that was cancelled lands late: in one layer, but the block is not free in any."""
    village = Village()
    there, here = cache(1, layout=KvLayout.PER_LAYER), cache(2, 5, KvLayout.PER_LAYER)
    async with village.live("a", there) as (owner, _), village.live("b", here) as (reader, plane):
        plane.mover.faults.lands_late, plane.mover.faults.block_s = True, 60
        async with owner.grant([6, 1], ttl_s=1000) as grant:
            with trio.move_on_after(30):
                await reader.read(
                    "a", [0, 4], [6, 1], ticket=grant.ticket, layers=range(1, 2), deadline_s=500
                )
            assert here.pool.in_flight_count == 2
            await trio.sleep(30)
            assert (here.pool.in_flight_count, here.pool.quarantined_count) == (0, 2)
            await trio.sleep(300)
            assert (here.pool.in_flight_count, here.pool.quarantined_count) == (0, 0)
    # What came late went into the second layer and no other.
    for layer, is_changed in ((0, False), (1, True), (2, False)):
        same = bytes(range_of(here.memory, layer * 5)) == bytes(
            range_of(there.memory, layer * 8 + 6)
        )
        assert same is is_changed
