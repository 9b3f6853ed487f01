"""The owner of the memory is killed or stopped in the middle of a transfer: two real processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import attrs
import pytest
import trio

from trinamo.runtime.errors import (
    ConnectError,
    DeadlineError,
    DisconnectedError,
    StaleMemoryError,
    TransportError,
)
from trinamo.runtime.planes import Transfer
from trinamo.runtime.protocol.transfer import Direction
from trinamo.transports.tcp.transfer import (
    TcpTransferPlane,
    TransferOptions,
    open_transfer_plane,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
OWNER = Path(__file__).with_name("transfer_owner.py")
BLOCKS, SIZE = 1024, 65536
ALL = list(range(BLOCKS))


@contextmanager
def owner_process(path: str) -> Iterator[tuple[subprocess.Popen[str], bytes]]:
    process = subprocess.Popen(
        [sys.executable, str(OWNER), str(BLOCKS), str(SIZE), path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield process, bytes.fromhex(json.loads(line)["description"])
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()


@attrs.frozen
class Ends:
    plane: TcpTransferPlane
    process: subprocess.Popen[str]
    description: bytes
    memory: bytearray
    source: bytes
    """What the owner's memory held at the start."""

    def block(self, number: int) -> bytes:
        return bytes(self.memory[number * SIZE : (number + 1) * SIZE])

    def check_confirmed(self, transfer: Transfer) -> None:
        """Every block said to have arrived holds the right bytes."""
        for number in range(transfer.confirmed_count):
            assert self.block(number) == self.source[number * SIZE : (number + 1) * SIZE]

    def sums(self) -> list[int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        while True:
            answer = json.loads(self.process.stdout.readline())
            if "sums" in answer:
                return list(answer["sums"])


@asynccontextmanager
async def open_ends(path: str) -> AsyncIterator[Ends]:
    options = TransferOptions(same_host=path == "copy", slice_bytes=4 * SIZE)
    with owner_process(path) as (process, description):
        source = random.Random(7).randbytes(BLOCKS * SIZE)
        async with open_transfer_plane(options) as plane:
            with trio.fail_after(30):
                yield Ends(plane, process, description, bytearray(BLOCKS * SIZE), source)


async def until_moved(transfer: Transfer, part: float) -> None:
    while transfer.confirmed_count < part * BLOCKS and not transfer.is_settled:
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_peer_that_dies_or_hangs_is_a_typed_error_in_time(
    direction: Direction, part: float, number: signal.Signals
) -> None:
    async with open_ends("stream") as ends:
        local = await ends.plane.register(ends.memory, block_bytes=SIZE)
        remote = await ends.plane.connect(ends.description)
        transfer = ends.plane.start(direction, local, ALL, remote, ALL, deadline_s=1.5)
        await until_moved(transfer, part)
        os.kill(ends.process.pid, number)
        started = trio.current_time()
        if number is signal.SIGKILL:
            try:
                await transfer.wait()
            except (DisconnectedError, ConnectError):
                assert transfer.confirmed_count < BLOCKS
        else:
            try:
                await transfer.wait()
            except DeadlineError:
                assert transfer.confirmed_count < BLOCKS
        assert trio.current_time() - started < 10
        assert transfer.is_settled
        if direction is Direction.READ:
            ends.check_confirmed(transfer)


@pytest.mark.parametrize("direction", Direction)
async def test_a_stopped_peer_that_goes_on_is_used_again_and_nothing_stale_lands(
    direction: Direction,
) -> None:
    async with open_ends("stream") as ends:
        ends.memory[:] = bytes([9]) * len(ends.memory)
        local = await ends.plane.register(ends.memory, block_bytes=SIZE)
        remote = await ends.plane.connect(ends.description)
        transfer = ends.plane.start(direction, local, ALL, remote, ALL, deadline_s=0.5)
        await until_moved(transfer, 0.3)
        os.kill(ends.process.pid, signal.SIGSTOP)
        with pytest.raises(DeadlineError):
            await transfer.wait()
        before = bytes(ends.memory)
        os.kill(ends.process.pid, signal.SIGCONT)
        await ends.plane.probe(remote)
        assert bytes(ends.memory) == before, "bytes landed after the transfer had settled"
        if direction is Direction.WRITE:
            # What the owner holds is ours or its own, block by block up to the last slices.
            nines = zlib.crc32(bytes([9]) * SIZE)
            own = [zlib.crc32(ends.source[b * SIZE : (b + 1) * SIZE]) for b in ALL]
            sums = ends.sums()
            assert sums[: transfer.confirmed_count] == [nines] * transfer.confirmed_count
            wrong = [b for b in ALL if sums[b] not in (nines, own[b])]
            assert len(wrong) <= 4, "more than the slice under way was torn"
        again = ends.plane.start(Direction.READ, local, ALL, remote, ALL, deadline_s=20)
        await again.wait()
        assert [zlib.crc32(ends.block(b)) for b in ALL] == ends.sums()


@pytest.mark.parametrize("direction", Direction)
async def test_a_neighbour_killed_in_the_middle_of_a_copy_is_a_typed_error(
    direction: Direction,
) -> None:
    async with open_ends("copy") as ends:
        local = await ends.plane.register(ends.memory, block_bytes=SIZE)
        remote = await ends.plane.connect(ends.description)
        done = await ends.plane.start(direction, local, [0], remote, [0], deadline_s=5).wait()
        assert done.path in ("same_host", "stream")
        transfer = ends.plane.start(direction, local, ALL, remote, ALL, deadline_s=5)
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        os.kill(ends.process.pid, signal.SIGKILL)
        ends.process.wait()
        with pytest.raises(TransportError):
            await transfer.wait()
        assert transfer.confirmed_count == 0, "a copy counts only when its owner has agreed"
        with pytest.raises((ConnectError, StaleMemoryError)):
            await ends.plane.connect(ends.description)


async def test_copies_between_two_processes_are_right_both_ways() -> None:
    async with open_ends("copy") as ends:
        local = await ends.plane.register(ends.memory, block_bytes=SIZE)
        remote = await ends.plane.connect(ends.description)
        order = random.Random(3).sample(ALL, BLOCKS)
        await ends.plane.start(Direction.READ, local, ALL, remote, order, deadline_s=20).wait()
        sums = ends.sums()
        assert [zlib.crc32(ends.block(b)) for b in ALL] == [sums[b] for b in order]
        ends.memory[: 3 * SIZE] = random.Random(4).randbytes(3 * SIZE)
        await ends.plane.start(
            Direction.WRITE, local, [2, 0, 1], remote, [5, 900, 6], deadline_s=20
        ).wait()
        sums = ends.sums()
        assert [sums[b] for b in (5, 900, 6)] == [zlib.crc32(ends.block(b)) for b in (2, 0, 1)]


async def test_a_hung_peer_does_not_hold_up_another_one() -> None:
    """No connect and no transfer waits behind one that goes to somebody else."""
    async with (
        open_ends("stream") as ends,
        open_transfer_plane(TransferOptions(same_host=False)) as other,
    ):
        local = await ends.plane.register(ends.memory, block_bytes=SIZE)
        theirs = await other.register(bytearray(8 * SIZE), block_bytes=SIZE)
        os.kill(ends.process.pid, signal.SIGSTOP)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends.plane.connect, ends.description)
            await trio.sleep(0.05)
            with trio.fail_after(2):
                remote = await ends.plane.connect(theirs.describe())
                await ends.plane.start(
                    Direction.WRITE, local, ALL[:8], remote, ALL[:8], deadline_s=2
                ).wait()
            nursery.cancel_scope.cancel()
