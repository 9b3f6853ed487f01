"""What the nixl plane adds to NIXL's bare bindings.

The same transfer is made by the bindings alone (prepared lists, post, poll without a pause) and by
the plane, in turns, since the machine's speed drifts; both over `cma` from one process to another,
64 MB as 1,024 scattered blocks of 64 KB. What an idle agent costs is in `bench_transfer_idle.py`.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import trio

from trinamo.cli.bench.transfer import Peer
from trinamo.runtime.protocol.transfer.description import Direction, decode_description
from trinamo.transports.nixl.agent import create_agent
from trinamo.transports.nixl.options import NixlOptions, find_devices, ucx_environment
from trinamo.transports.nixl.plane import open_nixl_plane
from trinamo.transports.one_sided.memory import Memory, parse_remote

COUNT, BLOCK_BYTES = 1024, 65_536
POOL = 2 * COUNT
SIZE = POOL * BLOCK_BYTES


class Bare:
    """The bindings alone."""

    def __init__(self, description: bytes) -> None:
        environment = ucx_environment(NixlOptions(), find_devices(None))
        self.agent = create_agent("bare", environment, progress_delay_s=0.02)
        self.array = np.ones(SIZE, dtype=np.uint8)  # Not zeros: the pages must be there.
        memory = Memory.at(self.array.ctypes.data, SIZE)
        self.agent.register(memory)
        remote = parse_remote(decode_description(description))
        peer = self.agent.load(remote.address)
        item = {"item_bytes": BLOCK_BYTES, "stride": BLOCK_BYTES, "count": POOL}
        self.local = self.agent.prepare(None, memory, **item)
        self.remote = self.agent.prepare(peer, remote.memory, **item)

    def move(self, direction: Direction, here: list[int], there: list[int]) -> float:
        began = time.perf_counter()
        handle = self.agent.post(direction, (self.local, here), (self.remote, there))
        while handle is not None and not self.agent.is_done(handle):
            pass
        if handle is not None:
            self.agent.release(handle)
        return time.perf_counter() - began


async def compare(rounds: int) -> None:
    owner = Peer("owner", "nixl cma", str(COUNT), str(BLOCK_BYTES))
    try:
        description = bytes.fromhex(owner.wait_ready()["description"])
        bare = Bare(description)
        dice = np.random.default_rng(7)
        async with open_nixl_plane() as plane:
            memory = np.ones(SIZE, dtype=np.uint8)
            region = await plane.register(memory.data, block_bytes=BLOCK_BYTES)
            remote = await plane.connect(description)
            for direction in Direction:
                bare_s, plane_s = [], []
                for _ in range(rounds + 2):
                    here = dice.permutation(POOL)[:COUNT].tolist()
                    there = dice.permutation(POOL)[:COUNT].tolist()
                    bare_s.append(bare.move(direction, here, there))
                    transfer = plane.start(direction, region, here, remote, there, deadline_s=60)
                    plane_s.append((await transfer.wait()).duration_s)
                gb = COUNT * BLOCK_BYTES / 1e9
                ratio = statistics.median(
                    a / b for a, b in zip(bare_s[2:], plane_s[2:], strict=True)
                )
                print(
                    f"| nixl cma {direction} | bare {gb / statistics.median(bare_s[2:]):.2f} GB/s "
                    f"| plane {gb / statistics.median(plane_s[2:]):.2f} GB/s | ratio {ratio:.2f} |",
                    flush=True,
                )
    finally:
        owner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    trio.run(compare, parser.parse_args().rounds)


if __name__ == "__main__":
    main()
