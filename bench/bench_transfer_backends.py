"""Each transfer backend between two processes, and NIXL's bare bindings beside the nixl plane.

`python bench/bench_transfer_backends.py [--rounds N]`. The table is that of `trinamo bench
transfer`; the last lines compare the plane with the same transfer made by the bindings alone, in
turns, since the machine's speed drifts.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import trio
from rich.console import Console

from trinamo.cli.transfer import BENCH_BACKENDS, Peer, measure, show
from trinamo.runtime.planes.one_sided_address import parse_remote
from trinamo.runtime.planes.one_sided_memory import Memory
from trinamo.runtime.protocol.transfer import Direction, decode_description
from trinamo.transports.nixl.agent import create_agent
from trinamo.transports.nixl.options import NixlOptions, find_devices, ucx_environment
from trinamo.transports.nixl.plane import open_nixl_plane

COUNT, BLOCK_BYTES = 1024, 65_536
SIZE = 2 * COUNT * BLOCK_BYTES


class Bare:
    """The bindings alone: prepared lists, post, poll without pause."""

    def __init__(self, description: bytes) -> None:
        environment = ucx_environment(NixlOptions(), find_devices(None))
        self.agent = create_agent("bare", environment, progress_delay_s=0.01)
        self.array = np.zeros(SIZE, dtype=np.uint8)
        memory = Memory(address=self.array.ctypes.data, length=SIZE)
        self.agent.register(memory)
        remote = parse_remote(decode_description(description))
        peer = self.agent.load(remote.address)
        item = {"item_bytes": BLOCK_BYTES, "stride": BLOCK_BYTES, "count": 2 * COUNT}
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


async def compare(rounds: int) -> list[str]:
    """One line a direction."""
    owner = Peer("owner", "nixl cma", str(COUNT), str(BLOCK_BYTES))
    lines = []
    try:
        description = bytes.fromhex(owner.wait_ready()["description"])
        bare = Bare(description)
        dice = np.random.default_rng(7)
        sources = dice.permutation(COUNT).tolist()
        targets = (dice.permutation(COUNT) + COUNT).tolist()
        async with open_nixl_plane() as plane:
            region = await plane.register(
                np.zeros(SIZE, dtype=np.uint8).data, block_bytes=BLOCK_BYTES
            )
            remote = await plane.connect(description)
            for direction in Direction:
                is_read = direction is Direction.READ
                here, there = (targets, sources) if is_read else (sources, targets)
                took: dict[str, list[float]] = {"bare": [], "plane": []}
                for _ in range(rounds + 2):
                    took["bare"].append(bare.move(direction, here, there))
                    transfer = plane.start(direction, region, here, remote, there, deadline_s=60)
                    took["plane"].append((await transfer.wait()).duration_s)
                gb = COUNT * BLOCK_BYTES / 1e9
                rate = {name: gb / statistics.median(each[2:]) for name, each in took.items()}
                lines.append(
                    f"nixl cma {direction}: bare {rate['bare']:.2f} GB/s, plane "
                    f"{rate['plane']:.2f} GB/s, ratio {rate['plane'] / rate['bare']:.2f}"
                )
    finally:
        owner.close()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    console = Console(width=110)
    rows = measure(list(BENCH_BACKENDS), count=COUNT, block_bytes=BLOCK_BYTES, rounds=rounds)
    show(rows, console, f"{COUNT} blocks of {BLOCK_BYTES} bytes, median of {rounds}")
    for line in trio.run(compare, rounds):
        print(line)


if __name__ == "__main__":
    main()
