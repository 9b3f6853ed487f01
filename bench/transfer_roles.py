"""The two processes of `bench_transfer.py`: an owner of memory and an initiator.

They answer commands on stdin, one JSON line each, as `roles.py` does for the other benchmarks.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
import zlib
from typing import Any

import numpy as np
import trio

from trinamo.runtime.protocol.transfer import Direction
from trinamo.transports.tcp.transfer import TransferOptions, open_transfer_plane

POOL_FACTOR = 2


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def options(kind: str) -> TransferOptions:
    if kind == "same-host":
        return TransferOptions()
    if kind == "same-host-verified":
        return TransferOptions(same_host_checksum=True)
    checksum: Any = {"tcp": "auto", "tcp-crc32": "crc32", "tcp-plain": "none"}[kind]
    return TransferOptions(same_host=False, checksum=checksum)


def pages(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def scatter(seed: int, count: int, pool: int) -> list[int]:
    return random.Random(seed).sample(range(pool), count)


async def commands(answer: Any) -> None:
    async for line in trio.wrap_file(sys.stdin):
        reply = await answer(json.loads(line))
        print(json.dumps(reply), flush=True)


async def lag_meter(found: list[float]) -> None:
    """How late a 1 ms sleep wakes up."""
    while True:
        before = time.perf_counter()
        await trio.sleep(0.001)
        found.append(time.perf_counter() - before - 0.001)


async def own(kind: str, blocks: int, block_bytes: int) -> None:
    memory = pages(1, POOL_FACTOR * blocks * block_bytes)
    lags: list[float] = []
    async with open_transfer_plane(options(kind)) as plane, trio.open_nursery() as nursery:
        region = await plane.register(memory.data, block_bytes=block_bytes)
        print(json.dumps({"description": region.describe().hex()}), flush=True)

        async def answer(command: dict[str, Any]) -> dict[str, Any]:
            if command["do"] == "lags":
                nursery.start_soon(lag_meter, lags)
            if command["do"] == "crc":
                size = block_bytes
                return {
                    "crc": [
                        zlib.crc32(memory[b * size : (b + 1) * size]) for b in command["blocks"]
                    ]
                }
            return {"cpu_s": cpu_s(), "lags": sorted(lags)[-1000:], "count": len(lags)}

        await commands(answer)
        nursery.cancel_scope.cancel()


async def initiate(kind: str, blocks: int, block_bytes: int, description: str) -> None:
    pool = POOL_FACTOR * blocks
    memory = pages(2, pool * block_bytes)
    lags: list[float] = []
    async with open_transfer_plane(options(kind)) as plane, trio.open_nursery() as nursery:
        region = await plane.register(memory.data, block_bytes=block_bytes)
        remote = await plane.connect(bytes.fromhex(description))
        print(json.dumps({}), flush=True)

        async def answer(command: dict[str, Any]) -> dict[str, Any]:
            if command["do"] == "lags":
                nursery.start_soon(lag_meter, lags)
                return {}
            here = scatter(command["seed"], blocks, pool)
            there = scatter(command["seed"] + 1, blocks, pool)
            lags.clear()
            before, started = cpu_s(), time.perf_counter()
            transfer = plane.start(
                Direction(command["do"]), region, here, remote, there, deadline_s=60
            )
            report = await transfer.wait()
            found = {
                "wall_s": time.perf_counter() - started,
                "cpu_s": cpu_s() - before,
                "path": report.path,
                "lags": sorted(lags)[-1000:],
                "count": len(lags),
            }
            if command.get("check"):
                size = block_bytes
                found["crc"] = [zlib.crc32(memory[b * size : (b + 1) * size]) for b in here]
                found["there"] = there
            return found

        await commands(answer)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    role, kind, blocks, block_bytes, *rest = sys.argv[1:]
    if role == "owner":
        trio.run(own, kind, int(blocks), int(block_bytes))
    else:
        trio.run(initiate, kind, int(blocks), int(block_bytes), rest[0])
