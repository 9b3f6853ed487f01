"""A process that owns a GPU's memory: `python -m tests.transports.nixl.gpu_owner SIZE COUNT SEED`.

It registers `COUNT` blocks of `SIZE` random bytes, prints the description as hexadecimal digits,
and then the SHA-256 of what the memory holds for every line it reads, until its input ends.
"""

from __future__ import annotations

import hashlib
import random
import sys

import trio

from tests.transports.nixl.gpu import find_gpu
from trinamo.transports.nixl.plane import open_nixl_plane


async def main(size: int, count: int, seed: int) -> None:
    gpu = find_gpu()
    assert gpu is not None
    content = random.Random(seed).randbytes(size * count)
    with gpu.allocated(content) as memory:
        async with open_nixl_plane() as plane:
            region = await plane.register(memory.as_device_memory, block_bytes=size)
            print(region.describe().hex(), flush=True)
            while await trio.to_thread.run_sync(sys.stdin.readline):
                print(hashlib.sha256(memory.read()).hexdigest(), flush=True)


if __name__ == "__main__":
    size, count, seed = map(int, sys.argv[1:])
    trio.run(main, size, count, seed)
