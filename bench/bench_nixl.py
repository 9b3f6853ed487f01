"""What the nixl plane adds to NIXL's bare bindings.

The same transfer is made by the bindings alone (prepared lists, post, poll without a pause) and by
the plane, in turns, since the machine's speed drifts; both over `cma` from one process to another,
64 MB as 1,024 scattered blocks of 64 KB. What an idle agent costs is in `bench_transfer_idle.py`.
With `--gpu` the blocks are in the memory of the first GPU, here and there (torch allocates it), of
64 KB and of 1 MB; beside it stands what a copy within the GPU does.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, Final

import numpy as np
import trio

from trinamo.cli.bench.transfer import Peer
from trinamo.runtime.kv.device_array import device_memory
from trinamo.runtime.planes import Registrable
from trinamo.runtime.protocol.transfer.description import Direction, decode_description
from trinamo.transports.nixl.agent import create_agent
from trinamo.transports.nixl.options import NixlOptions, find_devices, ucx_environment
from trinamo.transports.nixl.plane import open_nixl_plane
from trinamo.transports.one_sided.memory import Memory, parse_remote

COUNT: Final = 1024
BLOCK_BYTES: Final = 65_536
BIG_BYTES: Final = 1 << 20
"""Of blocks in a GPU's memory, too: those of a large model's layers together."""


class Bare:
    """The bindings alone."""

    def __init__(
        self, description: bytes, registered: Registrable, block_bytes: int, *, has_gpu: bool
    ) -> None:
        environment = ucx_environment(NixlOptions(), find_devices(None), has_gpu=has_gpu)
        self.agent = create_agent("bare", environment, progress_delay_s=0.02)
        # It keeps the memory in place.
        self.memory = Memory.of(registered)
        self.agent.register(self.memory)
        remote = parse_remote(decode_description(description))
        peer = self.agent.load(remote.address)
        item = {"item_bytes": block_bytes, "stride": block_bytes, "count": 2 * COUNT}
        self.local = self.agent.prepare(None, self.memory, **item)
        self.remote = self.agent.prepare(peer, remote.memory, **item)

    def move(self, direction: Direction, here: list[int], there: list[int]) -> float:
        began = time.perf_counter()
        handle = self.agent.post(direction, (self.local, here), (self.remote, there))
        while handle is not None and not self.agent.is_done(handle):
            pass
        if handle is not None:
            self.agent.release(handle)
        return time.perf_counter() - began


def on_host(size: int) -> Registrable:
    """Not zeros: the pages must be there."""
    return np.ones(size, dtype=np.uint8).data


def on_gpu(size: int) -> Registrable:
    """Memory of the first GPU, kept for as long as the process runs."""
    array = _torch().ones(size, dtype=_torch().uint8, device="cuda")
    _KEPT.append(array)
    return device_memory(array, device=0, synchronize=_torch().cuda.current_stream().synchronize)


_KEPT: Final[list[Any]] = []


def _torch() -> Any:
    return import_module("torch")


@contextmanager
def gpu_owner(block_bytes: int) -> Iterator[bytes]:
    """A process with memory of the GPU; its description."""
    command = [sys.executable, __file__, "--own", str(block_bytes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield bytes.fromhex(process.stdout.readline())
        process.stdin.close()


async def own(block_bytes: int) -> None:
    """That process."""
    async with open_nixl_plane() as plane:
        region = await plane.register(on_gpu(2 * COUNT * block_bytes), block_bytes=block_bytes)
        print(region.describe().hex(), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)


async def compare(
    what: str,
    description: bytes,
    allocate: Callable[[int], Registrable],
    block_bytes: int,
    rounds: int,
    *,
    has_gpu: bool = False,
) -> None:
    size = 2 * COUNT * block_bytes
    bare = Bare(description, allocate(size), block_bytes, has_gpu=has_gpu)
    dice = np.random.default_rng(7)
    async with open_nixl_plane() as plane:
        region = await plane.register(allocate(size), block_bytes=block_bytes)
        remote = await plane.connect(description)
        for direction in Direction:
            bare_s, plane_s = [], []
            for _ in range(rounds + 2):
                here = dice.permutation(2 * COUNT)[:COUNT].tolist()
                there = dice.permutation(2 * COUNT)[:COUNT].tolist()
                bare_s.append(bare.move(direction, here, there))
                transfer = plane.start(direction, region, here, remote, there, deadline_s=60)
                plane_s.append((await transfer.wait()).duration_s)
            gb = COUNT * block_bytes / 1e9
            ratio = statistics.median(a / b for a, b in zip(bare_s[2:], plane_s[2:], strict=True))
            print(
                f"| {what} {direction} | bare {gb / statistics.median(bare_s[2:]):.2f} GB/s "
                f"| plane {gb / statistics.median(plane_s[2:]):.2f} GB/s | ratio {ratio:.2f} |",
                flush=True,
            )


def copied_within(block_bytes: int, rounds: int) -> None:
    """What the GPU itself does: a copy of as many bytes in one piece, counted once."""
    size, torch = COUNT * block_bytes, _torch()
    source, target = (torch.ones(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    taken = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    print(f"| a copy within the GPU | {size / 1e9 / statistics.median(taken[2:]):.2f} GB/s | | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--gpu", action="store_true", help="blocks in the memory of a GPU")
    parser.add_argument("--own", type=int, metavar="BLOCK_BYTES", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.own:
        trio.run(own, chosen.own)
        return
    if not chosen.gpu:
        owner = Peer("owner", "nixl cma", str(COUNT), str(BLOCK_BYTES))
        try:
            description = bytes.fromhex(owner.wait_ready()["description"])
            trio.run(compare, "nixl cma", description, on_host, BLOCK_BYTES, chosen.rounds)
        finally:
            owner.close()
        return
    for block_bytes in (BLOCK_BYTES, BIG_BYTES):
        blocks = f"{COUNT} blocks of {block_bytes >> 10} KiB"
        for place, allocate in (("GPU to GPU", on_gpu), ("host to GPU", on_host)):
            with gpu_owner(block_bytes) as description:
                what = f"{place}, {blocks},"
                trio.run(
                    partial(compare, has_gpu=True),
                    *(what, description, allocate, block_bytes, chosen.rounds),
                )
        copied_within(block_bytes, chosen.rounds)


if __name__ == "__main__":
    main()
