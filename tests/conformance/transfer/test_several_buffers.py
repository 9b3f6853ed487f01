"""A region of several buffers, such as one for each layer: blocks are numbered through all of them.

Here three buffers of five blocks each; the owner's pool has as many blocks as a buffer, and each of
them is a part in every buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from tests.conformance.transfer.backends import BLOCK_BYTES, Pages
from tests.conformance.transfer.ends import DEADLINE_S, READ, Ends
from trinamo.runtime.errors import IncompatibleKvError, RequestError, StaleMemoryError
from trinamo.runtime.planes import MemoryRegion, RemoteMemory, TransferPlane
from trinamo.runtime.protocol.transfer.description import Direction, decode_description

PARTS = 3
POOL = 5


@attrs.frozen
class Layers:
    """Memory of one end: buffers with room between them, so that they are no neighbours."""

    buffers: list[Pages]
    region: MemoryRegion

    def block(self, number: int) -> bytes:
        buffer, place = divmod(number, len(self.buffers[0].memory) // BLOCK_BYTES)
        return self.buffers[buffer].block(place)

    def expect(self, number: int, data: bytes) -> None:
        buffer, place = divmod(number, len(self.buffers[0].memory) // BLOCK_BYTES)
        self.buffers[buffer].expect(place, data)

    def check(self) -> None:
        for each in self.buffers:
            assert each.memory == each.expected


async def layers(plane: TransferPlane, seed: int, pool: int, **more: Any) -> Layers:
    buffers = [Pages(seed + number, pool) for number in range(PARTS)]
    region = await plane.register(
        [each.memory for each in buffers], block_bytes=BLOCK_BYTES, parts=PARTS, **more
    )
    return Layers(buffers, region)


@attrs.frozen
class Both:
    ends: Ends
    here: Layers
    there: Layers
    remote: RemoteMemory

    async def move(
        self, direction: Direction, here: Sequence[int], there: Sequence[int], **more: Any
    ) -> None:
        """Move and expect what must be where afterwards."""
        for a, b in zip(here, there, strict=True):
            if direction is READ:
                self.here.expect(a, self.there.block(b))
            else:
                self.there.expect(b, self.here.block(a))
        transfer = self.ends.ours.start(
            *(direction, self.here.region, list(here), self.remote, list(there)),
            **{"deadline_s": DEADLINE_S, "ticket": 7, **more},
        )
        await transfer.wait()
        self.here.check()
        self.there.check()


@pytest.fixture
async def both(ends: Ends) -> Both:
    """Pools of different sizes; block 1 and 3 of the peer's are granted, whole."""
    here = await layers(ends.ours, 30, POOL + 2)
    there = await layers(ends.theirs, 60, POOL, needs_ticket=True)
    there.region.grant(7, [1, 3])
    return Both(ends, here, there, await ends.ours.connect(there.region.describe()))


def parts(blocks: Sequence[int], pool: int, of: Sequence[int] = range(PARTS)) -> list[int]:
    return [part * pool + block for part in of for block in blocks]


@pytest.mark.parametrize("direction", Direction)
async def test_a_ticket_for_a_block_is_one_for_its_parts_in_all_buffers(
    both: Both, direction: Direction
) -> None:
    await both.move(direction, parts([6, 2], POOL + 2), parts([1, 3], POOL))


@pytest.mark.parametrize("direction", Direction)
async def test_the_parts_of_one_buffer_move_without_the_others(
    both: Both, direction: Direction
) -> None:
    await both.move(direction, parts([6, 2], POOL + 2, [1]), parts([1, 3], POOL, [1]))


@pytest.mark.parametrize("direction", Direction)
async def test_blocks_that_count_up_over_the_end_of_a_buffer_are_no_neighbours(
    ends: Ends, direction: Direction
) -> None:
    """The last block of a buffer and the first of the next follow in number, not in memory."""
    here, there = await layers(ends.ours, 30, POOL), await layers(ends.theirs, 60, POOL + 1)
    both = Both(ends, here, there, await ends.ours.connect(there.region.describe()))
    everything = range(PARTS * POOL)
    await both.move(direction, everything, everything, ticket=0)


async def test_no_part_of_a_block_that_was_not_granted_moves(both: Both) -> None:
    for part in range(PARTS):
        with pytest.raises(StaleMemoryError, match="not granted"):
            await both.ends.ours.start(
                *(READ, both.here.region, [0, 1], both.remote, parts([1, 2], POOL, [part])),
                deadline_s=DEADLINE_S,
                ticket=7,
            ).wait()
    with pytest.raises(RequestError):
        both.there.region.grant(8, [POOL])


async def test_regions_of_other_parts_do_not_pair(ends: Ends, both: Both) -> None:
    flat = await ends.ours.register(bytearray(BLOCK_BYTES * 6), block_bytes=BLOCK_BYTES, parts=2)
    with pytest.raises(IncompatibleKvError, match="2 times 4096 bytes here, of 3 times 4096"):
        ends.ours.start(READ, flat, [0], both.remote, [1], deadline_s=DEADLINE_S, ticket=7)


async def test_buffers_that_are_not_alike_are_no_region(ends: Ends) -> None:
    for wrong in ([bytearray(4096), bytearray(8192)], [], [bytearray(4096)] * 1025):
        with pytest.raises(RequestError):
            await ends.ours.register(wrong, block_bytes=BLOCK_BYTES)
    with pytest.raises(RequestError, match="no whole number"):
        await ends.ours.register([bytearray(BLOCK_BYTES)] * 3, block_bytes=BLOCK_BYTES, parts=2)


async def test_a_region_of_several_buffers_is_given_back_whole(both: Both) -> None:
    await both.ends.theirs.deregister(both.there.region)
    with pytest.raises(StaleMemoryError):
        await both.ends.ours.start(
            *(READ, both.here.region, [0], both.remote, [1]), deadline_s=DEADLINE_S, ticket=7
        ).wait()
    again = await layers(both.ends.theirs, 90, POOL)
    described = decode_description(again.region.describe())
    assert (described.pool_blocks, described.parts, described.block_count) == (POOL, PARTS, 15)
