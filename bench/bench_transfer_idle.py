"""What moving KV blocks costs beside the blocks: late event loops, and processes that only wait.

For each backend, between two processes: the CPU that each side takes while it is connected and
nothing moves, then the lag (p99, of a task that wants to run every millisecond) of the owner's event
loop while nothing moves, which is the machine's share, and of both loops while 256 MB move, each
direction. The bytes are compared. `python bench/bench_transfer_idle.py
[--rounds N] [--idle-s S] [--backend NAME …]`.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack

from trinamo.cli.bench.transfer import BENCH_BACKENDS, DIRECTIONS, Peer

BLOCKS, BLOCK_BYTES = 4096, 65_536


def measure(backend: str, rounds: int, idle_s: float) -> list[str]:
    with ExitStack() as held:
        size = (str(BLOCKS), str(BLOCK_BYTES))
        owner = Peer("owner", backend, *size)
        held.callback(owner.close)
        mover = Peer("mover", backend, *size, owner.wait_ready()["description"])
        held.callback(mover.close)
        mover.wait_ready()
        mover.ask("run", direction="read", blocks=1, rounds=1, lag=False)
        before = [peer.ask("cpu")["cpu_s"] for peer in (mover, owner)]
        time.sleep(idle_s)
        after = [peer.ask("cpu")["cpu_s"] for peer in (mover, owner)]
        idle = [(b - a) / idle_s * 100 for a, b in zip(before, after, strict=True)]
        owner.ask("watch")
        time.sleep(min(2.0, idle_s))
        cells = [f"{owner.ask('lag')['lag_p99_ms']:.1f}"]
        for direction in DIRECTIONS:
            owner.ask("lag")
            found = mover.ask("run", direction=direction, blocks=BLOCKS, rounds=rounds, lag=True)
            late_ms = owner.ask("lag")["lag_p99_ms"]
            good = found["good"]
            if direction == "write":
                good = owner.ask("check", blocks=BLOCKS)["good"]
            if not good:
                raise SystemExit(f"{backend} {direction}: WRONG BYTES")
            cells.append(f"{found['lag_p99_ms']:.1f} / {late_ms:.1f}")
    return [f"{idle[0]:.2f} / {idle[1]:.2f}", *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle-s", type=float, default=10.0)
    parser.add_argument(
        "--backend", nargs="*", default=list(BENCH_BACKENDS), choices=BENCH_BACKENDS
    )
    chosen, _ = parser.parse_known_args()
    print("| backend | idle, % of a core | lag p99 ms: idle | read | write |")
    print("|---|---|---|---|---|")
    for backend in chosen.backend:
        try:
            cells = measure(backend, chosen.rounds, chosen.idle_s)
        except RuntimeError as error:
            cells = [f"not here: {error}", "", "", ""]
        print(f"| {backend} | {' | '.join(cells)} |", flush=True)
    print("\nmover / owner where there are two figures")


if __name__ == "__main__":
    main()
