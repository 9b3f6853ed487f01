"""The two processes of `bench/bench_transfer.py`: an owner of memory and an initiator.

They answer commands on stdin, one JSON line each, as `roles.py` does for the other benchmarks. What
cannot be opened here says why instead of where it is.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
import zlib
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import trio

from trinamo.cli.bench.transfer_roles import open_plane
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.planes import TransferPlane
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.transports.tcp.transfer.plane import TransferOptions, open_transfer_plane

POOL_FACTOR = 2
SMALL_BYTES, SMALL_BLOCKS = 4096, 16

OPTIONS = {
    "tcp": TransferOptions(),
    "tcp-crc32": TransferOptions(checksum="crc32"),
    "tcp-plain": TransferOptions(checksum="none"),
}
NAMES = {"nixl-tcp": "nixl tcp", "nixl-cma": "nixl cma", "mooncake-tcp": "mooncake tcp"}


def opened(kind: str) -> AbstractAsyncContextManager[TransferPlane]:
    return open_transfer_plane(OPTIONS[kind]) if kind in OPTIONS else open_plane(NAMES[kind])


def pages(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def scatter(seed: int, count: int, pool: int) -> list[int]:
    return random.Random(seed).sample(range(pool), count)


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def sums(memory: np.ndarray, blocks: list[int], size: int) -> list[int]:
    return [zlib.crc32(memory[b * size : (b + 1) * size]) for b in blocks]


async def commands(answer: Any) -> None:
    async for line in trio.wrap_file(sys.stdin):
        say(await answer(json.loads(line)))


async def own(kind: str, blocks: int, size: int) -> None:
    memory, few = pages(1, POOL_FACTOR * blocks * size), pages(3, SMALL_BLOCKS * SMALL_BYTES)
    async with opened(kind) as plane:
        region = await plane.register(memory.data, block_bytes=size)
        small = await plane.register(few.data, block_bytes=SMALL_BYTES)
        say({"description": region.describe().hex(), "small": small.describe().hex()})

        async def answer(command: dict[str, Any]) -> dict[str, Any]:
            if command["do"] == "crc":
                return {"crc": sums(memory, command["blocks"], size)}
            return {"cpu_s": time.process_time()}

        await commands(answer)


class Initiator:
    def __init__(self, plane: TransferPlane, blocks: int, size: int) -> None:
        self.plane = plane
        self.blocks, self.size, self.pool = blocks, size, POOL_FACTOR * blocks
        self.memory, self.few = pages(2, self.pool * size), pages(4, SMALL_BLOCKS * SMALL_BYTES)

    async def connect(self, description: str, small: str) -> None:
        self.region = await self.plane.register(self.memory.data, block_bytes=self.size)
        self.remote = await self.plane.connect(bytes.fromhex(description))
        self.few_region = await self.plane.register(self.few.data, block_bytes=SMALL_BYTES)
        self.few_remote = await self.plane.connect(bytes.fromhex(small))

    async def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["do"] == "small":
            return await self.move_one(Direction(command["direction"]), command["rounds"])
        return await self.move(Direction(command["do"]), command)

    async def move_one(self, direction: Direction, rounds: int) -> dict[str, Any]:
        """One block of 4 KB, again and again."""
        took = []
        for number in range(rounds):
            block = [number % SMALL_BLOCKS]
            began = time.perf_counter()
            transfer = self.plane.start(
                direction, self.few_region, block, self.few_remote, block, deadline_s=60
            )
            await transfer.wait()
            took.append(time.perf_counter() - began)
        return {"median_s": statistics.median(took)}

    async def move(self, direction: Direction, command: dict[str, Any]) -> dict[str, Any]:
        """Some transfers in a row; the first follows an idle time and is told by itself."""
        here = scatter(command["seed"], self.blocks, self.pool)
        there = scatter(command["seed"] + 1, self.blocks, self.pool)
        before, took = time.process_time(), []
        for _ in range(1 + command["repeats"]):
            started = time.perf_counter()
            transfer = self.plane.start(
                direction, self.region, here, self.remote, there, deadline_s=60
            )
            report = await transfer.wait()
            took.append(time.perf_counter() - started)
        found = {
            "first_s": took[0],
            "wall_s": statistics.mean(took[1:]),
            "cpu_s": time.process_time() - before,
            "path": report.path,
        }
        if command.get("check"):
            found |= {"crc": sums(self.memory, here, self.size), "there": there}
        return found


async def initiate(kind: str, blocks: int, size: int, description: str, small: str) -> None:
    async with opened(kind) as plane:
        initiator = Initiator(plane, blocks, size)
        await initiator.connect(description, small)
        say({})
        await commands(initiator.answer)


def main() -> None:
    role, kind, blocks, size, *rest = sys.argv[1:]
    try:
        if role == "owner":
            trio.run(own, kind, int(blocks), int(size))
        else:
            trio.run(initiate, kind, int(blocks), int(size), *rest)
    except* TrinamoError as group:
        say({"problem": str(group.exceptions[0])})


if __name__ == "__main__":
    main()
