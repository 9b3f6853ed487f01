"""A process of its own that owns memory, to be killed or stopped in the middle of a transfer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import numpy as np
import trio
import trio.lowlevel

from trinamo.runtime.planes import MemoryRegion, RemoteMemory, Transfer, TransferPlane
from trinamo.runtime.protocol.transfer import Direction

COUNT = 512
BLOCK_BYTES = 65_536


@attrs.frozen
class Owner:
    """The process and the description of its `2 * COUNT` blocks."""

    process: subprocess.Popen[str]
    description: bytes

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@contextmanager
def running_owner(backend: str) -> Iterator[Owner]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "trinamo.cli.transfer_roles"),
            *("owner", backend, str(COUNT), str(BLOCK_BYTES)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield Owner(process, bytes.fromhex(json.loads(process.stdout.readline())["description"]))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stdin.close()


@attrs.frozen
class Mover:
    """Our end of a transfer of all blocks."""

    plane: TransferPlane
    region: MemoryRegion
    remote: RemoteMemory
    memory: bytearray

    def start(self, direction: Direction, *, deadline_s: float) -> Transfer:
        blocks = [int(each) for each in np.random.default_rng(3).permutation(COUNT)]
        return self.plane.start(
            direction, self.region, blocks, self.remote, blocks, deadline_s=deadline_s
        )


async def connect(plane: TransferPlane, owner: Owner) -> Mover:
    memory = bytearray(2 * COUNT * BLOCK_BYTES)
    region = await plane.register(memory, block_bytes=BLOCK_BYTES)
    return Mover(plane, region, await plane.connect(owner.description), memory)


async def moved(transfer: Transfer, share: float) -> None:
    """Return once this share of the blocks is confirmed."""
    with trio.fail_after(20):
        while transfer.confirmed_count < share * COUNT:
            await trio.lowlevel.checkpoint()


def noise() -> bytes:
    """What the owner's first `COUNT` blocks hold."""
    noise = np.random.default_rng(2).integers(0, 256, COUNT * BLOCK_BYTES, dtype=np.uint8)
    return noise.tobytes()
