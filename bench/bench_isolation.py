"""What one stream, or one process, does to the others: a reader that stalls, a process that dies.

A client that asks for a flood of tokens and reads none of it: the inter-token p99 of 64 paced
streams from the same worker, with and without it, in turns. And a caller or a worker killed with -9
under 256 streams: how long until each handler is cancelled, or each stream has its typed error.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench_http import Load, System, open_system
from load.load import body
from roles.processes import open_pairs, percentile, rss_mb

PACED = Load("64 paced streams", 64, 150, pause_s=0.02)
FLOOD_TOKENS = 10_000_000
HELD = 256


@contextmanager
def stalled_reader(system: System) -> Iterator[None]:
    """A client of the flood that reads its first bytes and no more."""
    asked = body(system.models[-1], tokens=FLOOD_TOKENS)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(asked)}\r\n\r\n"
    )
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", system.port))
        client.sendall(head.encode() + asked)
        client.recv(256)
        time.sleep(0.3)  # The pipes fill.
        yield


def run_stalled(rounds: int, *, is_quick: bool = False) -> dict[str, float]:
    """Inter-token p99 in ms alone and beside the stalled stream; memory of the frontend after it."""
    load = PACED.quick() if is_quick else PACED
    alone, beside, changes = [], [], []
    with open_system("trinamo", trinamo=("steps",)) as system:
        system.measure(load)
        for _ in range(rounds):
            alone.append(system.measure(load)["itl_p99_ms"])
            with stalled_reader(system):
                beside.append(system.measure(load)["itl_p99_ms"])
            changes.append(beside[-1] / alone[-1] - 1)
        memory = rss_mb(system.sides["frontend"].pid)
    found = {
        "alone_p99_ms": statistics.median(alone),
        "beside_p99_ms": statistics.median(beside),
        "change": statistics.median(changes),
        "frontend_rss_mb": memory,
    }
    print(
        f"| a stalled reader | ITL p99 {found['alone_p99_ms']:.2f} ms alone, "
        f"{found['beside_p99_ms']:.2f} beside it ({found['change']:+.1%}) | {memory:.0f} MB |",
        flush=True,
    )
    return found


def run_deaths(streams: int) -> dict[str, dict[str, float]]:
    """Milliseconds from SIGKILL of one side to the end of each stream on the other."""
    results = {}
    for victim in ("caller", "worker"):
        with open_pairs(["trinamo"]) as (pair,):
            pair.client.ask("hold", count=streams)
            dies, lives = (
                (pair.client, pair.worker) if victim == "caller" else (pair.worker, pair.client)
            )
            at = time.perf_counter()
            dies.signal(signal.SIGKILL)
            deadline = time.monotonic() + 20
            ends: dict[str, float] = {}
            while len(ends) < streams and time.monotonic() < deadline:
                time.sleep(0.2)
                ends |= lives.ask("cancellations" if victim == "caller" else "losses")["at"]
        assert len(ends) == streams, f"{len(ends)} of {streams} streams ended"
        late = [(each - at) * 1e3 for each in ends.values()]
        results[victim] = {"p50": percentile(late, 50), "max": max(late)}
        print(
            f"| {victim} killed under {streams} streams | p50 {results[victim]['p50']:.1f} ms "
            f"| all after {results[victim]['max']:.1f} ms |",
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="hardly anything, to see that it works"
    )
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args()
    rounds, streams = (1, 8) if options.quick else (options.rounds, HELD)
    results = {
        "stalled": run_stalled(rounds, is_quick=options.quick),
        "deaths": run_deaths(streams),
    }
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), "utf-8")


if __name__ == "__main__":
    main()
