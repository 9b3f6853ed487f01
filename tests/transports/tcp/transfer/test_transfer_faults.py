"""What only the tcp plane promises when the other process hangs or dies; all rows are in
`tests/transports/test_transfer_faults.py`.
"""

from __future__ import annotations

import random
import signal
from collections.abc import AsyncIterator

import pytest
import trio

from tests.transports.memory_owner import open_backend
from tests.transports.owner_process import (
    BLOCK_BYTES,
    COUNT,
    ORDER,
    connect,
    noise,
    ours,
    running_owner,
    strike_at,
)
from trinamo.runtime.errors import DeadlineError
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.transports.tcp.transfer.plane import TransferOptions, open_transfer_plane


@pytest.fixture(autouse=True)
async def bounded() -> AsyncIterator[None]:
    with trio.fail_after(120):
        yield


def block(memory: bytes | bytearray, number: int) -> bytes:
    return bytes(memory[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])


@pytest.mark.parametrize("direction", Direction)
async def test_a_stopped_peer_that_goes_on_is_used_again_and_nothing_stale_lands(
    direction: Direction,
) -> None:
    with running_owner("tcp") as owner:
        async with open_backend("tcp") as plane:
            mover = await connect(plane, owner)
            struck = await strike_at(mover, owner, direction, 0.3, signal.SIGSTOP, deadline_s=0.5)
            with pytest.raises(DeadlineError):
                await struck.transfer.wait()
            assert struck.transfer.is_settled
            before = bytes(mover.memory)
            owner.send(signal.SIGCONT)
            await plane.probe(mover.remote)
            assert bytes(mover.memory) == before, "bytes landed after the transfer had settled"
            assert mover.wrong_count(struck.transfer, direction, owner) == 0
            if direction is Direction.WRITE:
                # What the owner holds is ours or its own, block by block up to the last slices.
                whole = bytes(owner.memory)
                torn = [
                    number
                    for number in range(COUNT)
                    if block(whole, number) not in (block(ours(), number), block(noise(), number))
                ]
                assert len(torn) <= 4, "more than the slice under way was torn"
            await mover.start(Direction.READ, deadline_s=20).wait()
            assert mover.memory == owner.memory[:]


async def test_blocks_between_two_processes_are_right_both_ways() -> None:
    with running_owner("tcp") as owner:
        async with open_backend("tcp") as plane:
            mover = await connect(plane, owner)
            here = list(range(COUNT))
            there = random.Random(3).sample(here, COUNT)
            await plane.start(
                Direction.READ, mover.region, here, mover.remote, there, deadline_s=20
            ).wait()
            assert [block(mover.memory, b) for b in here] == [block(noise(), b) for b in there]
            mover.memory[:] = ours()
            await plane.start(
                Direction.WRITE, mover.region, [2, 0, 1], mover.remote, [5, 200, 6], deadline_s=20
            ).wait()
            arrived = bytes(owner.memory)
            assert [block(arrived, b) for b in (5, 200, 6)] == [block(ours(), b) for b in (2, 0, 1)]
            assert block(arrived, 7) == block(noise(), 7)


async def test_a_hung_peer_does_not_hold_up_another_one() -> None:
    """No connect and no transfer waits behind one that goes to somebody else."""
    with running_owner("tcp") as owner:
        async with (
            open_backend("tcp") as plane,
            open_transfer_plane(TransferOptions()) as other,
        ):
            local = await plane.register(bytearray(COUNT * BLOCK_BYTES), block_bytes=BLOCK_BYTES)
            theirs = await other.register(bytearray(8 * BLOCK_BYTES), block_bytes=BLOCK_BYTES)
            owner.send(signal.SIGSTOP)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(plane.connect, owner.description)
                await trio.sleep(0.05)
                with trio.fail_after(120):
                    remote = await plane.connect(theirs.describe())
                    await plane.start(
                        Direction.WRITE, local, ORDER[:8], remote, list(range(8)), deadline_s=120
                    ).wait()
                nursery.cancel_scope.cancel()
