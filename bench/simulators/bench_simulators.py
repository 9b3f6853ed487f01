"""The simulator beside simloom and detangle: the same programs on asyncio, what each finds and how it runs them.

    python bench/simulators/bench_simulators.py --seeds 300

The others are installed into an environment of their own, once, below ~/.cache/trinamo-bench; simloom
needs Python 3.12. Processor time, of one process each, one after the other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import programs
import trio
import trio_asyncio

from trinamo.sim import Network, Policy, SeedChoices, World

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
PEERS = ("simloom==0.5.0", "detangle==0.1.0")
RUNS = (
    ("trinamo", "step"),
    ("trinamo", "pct"),
    ("simloom", "random"),
    ("simloom", "pct:auto"),
    ("detangle", "random"),
    ("detangle", "pct"),
)


def ours(program: Callable[[], Awaitable[int]], seed: int, policy: Policy) -> int:
    """What one run of a program on a host has seen."""
    world = World(SeedChoices(seed), policy=policy, keep_rows=False)
    Network(world)
    seen: list[int] = []

    async def host() -> None:
        async with trio_asyncio.open_loop():
            seen.append(await trio_asyncio.aio_as_trio(program)())

    async def main() -> None:
        world.boot("one", host)
        while not seen:
            await trio.sleep(1)

    world.run(main)
    return seen[0]


def all_of_ours(seeds: int, policy: Policy) -> dict[str, Any]:
    """As a peer prints them."""
    told = {}
    for name, program, count in (
        ("lost_update", programs.lost_update, seeds),
        ("careful_update", programs.careful_update, seeds),
        ("pieces", lambda: programs.pieces("one"), seeds // 10),
        ("never_read", lambda: programs.never_read("one"), 1),
    ):
        begun = time.process_time()
        seen = [ours(program, seed, policy) for seed in range(count)]
        told[name] = {"seen": seen, "cpu_s": time.process_time() - begun}
    return told


def environment(python: str) -> str:
    """The Python that has the others, made when it is not there."""
    from load.load import cache_directory

    folder = cache_directory() / "simulators"
    found = folder / "bin" / "python"
    if not found.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(found), "-m", "pip", "install", "--quiet", *PEERS], check=True)
    return str(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--python", default="python3.12", help="for the environment of the others")
    options = parser.parse_args()
    other = environment(options.python)
    print(
        "| simulator | policy | careless: finds of seeds | careful: finds of seeds | µs a run |"
        " 30 writes are read in pieces | bytes to who never reads |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, policy in RUNS:
        if name == "trinamo":
            told = all_of_ours(options.seeds, policy)
        else:
            command = [other, str(HERE / "peer.py"), name, str(options.seeds), policy]
            told = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        found = [
            sum(each != 0 for each in told[what]["seen"])
            for what in ("lost_update", "careful_update")
        ]
        pieces = told["pieces"]["seen"]
        us = told["lost_update"]["cpu_s"] / options.seeds * 1e6
        row = (
            name,
            policy,
            *found,
            round(us),
            f"{min(pieces)} to {max(pieces)}",
            told["never_read"]["seen"][0],
        )
        print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main()
