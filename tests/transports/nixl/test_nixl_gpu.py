"""Blocks move to and from the memory of a real GPU, where the machine has one.

What can be shown without one, the order of moving and synchronising, is in
`test_nixl_devices.py`.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from tests import needs
from tests.transports.nixl.gpu import Gpu, find_gpu
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.planes import TransferPlane
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.transports.nixl.plane import open_nixl_plane

needs.NIXL.imported()

ROOT = Path(__file__).parents[3]
SIZE, COUNT = 65_536, 64
TOTAL = SIZE * COUNT
ORDER = random.Random(5).sample(range(COUNT), COUNT)
FILLS = 2_000


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    found = find_gpu()
    if found is None:
        needs.GPU.lacking()
    return found


@pytest.fixture
async def plane(gpu: Gpu) -> AsyncIterator[TransferPlane]:
    with trio.fail_after(120):
        async with open_nixl_plane() as opened:
            yield opened


def content(seed: int) -> bytes:
    return random.Random(seed).randbytes(TOTAL)


@contextmanager
def running_owner(seed: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.transports.nixl.gpu_owner"]
    with subprocess.Popen(
        [*command, str(SIZE), str(COUNT), str(seed)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


async def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return (await trio.to_thread.run_sync(process.stdout.readline)).strip()


async def digest(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    process.stdin.write("digest\n")
    process.stdin.flush()
    return await said(process)


@pytest.mark.parametrize("is_on_gpu", [True, False], ids=["from a GPU", "from host memory"])
@pytest.mark.parametrize("direction", Direction)
async def test_every_block_reaches_the_gpu_of_another_process_and_comes_back(
    gpu: Gpu, plane: TransferPlane, direction: Direction, is_on_gpu: bool
) -> None:
    with running_owner(seed=2) as process, gpu.allocated(content(1)) as memory:
        host = bytearray(content(1))
        remote = await plane.connect(bytes.fromhex(await said(process)))
        local = await plane.register(
            memory.as_device_memory if is_on_gpu else host, block_bytes=SIZE
        )

        transfer = plane.start(direction, local, ORDER, remote, ORDER, deadline_s=30)
        report = await transfer.wait()

        assert report.byte_count == TOTAL
        source = 1 if direction is Direction.WRITE else 2
        assert (memory.read() if is_on_gpu else bytes(host)) == content(source)
        assert await digest(process) == hashlib.sha256(content(source)).hexdigest()


async def test_blocks_that_a_stream_still_writes_are_sent_as_it_leaves_them(
    gpu: Gpu, plane: TransferPlane
) -> None:
    """Without `synchronize` the bytes of before would be sent: the queue is long when it starts."""
    with (
        running_owner(seed=2) as process,
        gpu.allocated(bytes(TOTAL)) as memory,
        gpu.allocated(content(3)) as last,
        gpu.allocated(bytes(1 << 28)) as elsewhere,
    ):
        remote = await plane.connect(bytes.fromhex(await said(process)))
        local = await plane.register(memory.as_device_memory, block_bytes=SIZE)
        for value in range(FILLS):
            elsewhere.queue_fill(value % 256)
        memory.queue_copy_of(last)
        assert memory.read() == bytes(TOTAL), "the queue was over before the transfer began"

        await plane.start(Direction.WRITE, local, ORDER, remote, ORDER, deadline_s=30).wait()

        assert await digest(process) == hashlib.sha256(content(3)).hexdigest()


async def test_a_copy_queued_after_a_read_was_reported_finds_its_bytes(
    gpu: Gpu, plane: TransferPlane
) -> None:
    with (
        running_owner(seed=2) as process,
        gpu.allocated(bytes(TOTAL)) as memory,
        gpu.allocated(bytes(TOTAL)) as user,
    ):
        remote = await plane.connect(bytes.fromhex(await said(process)))
        local = await plane.register(memory.as_device_memory, block_bytes=SIZE)

        await plane.start(Direction.READ, local, ORDER, remote, ORDER, deadline_s=30).wait()
        user.queue_copy_of(memory)
        gpu.synchronize()

        assert user.read() == content(2)


async def test_a_peer_with_gpu_memory_that_is_killed_ends_the_transfer_and_not_us(
    gpu: Gpu, plane: TransferPlane
) -> None:
    with gpu.allocated(content(1)) as memory:
        local = await plane.register(memory.as_device_memory, block_bytes=SIZE)
        with running_owner(seed=2) as process:
            remote = await plane.connect(bytes.fromhex(await said(process)))
            process.kill()
            process.wait()
        transfer = plane.start(Direction.WRITE, local, ORDER, remote, ORDER, deadline_s=10)
        with pytest.raises(TrinamoError):
            await transfer.wait()
        await transfer.wait_settled()
        assert memory.read() == content(1)
