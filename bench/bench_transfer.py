"""KV transfers between two processes by every backend: GB/s, CPU, latency, and what they are to each other.

64 MB as 1,024 scattered blocks of 64 KB by default. In a round every backend moves them five times
in a row in each direction, then iperf3 sends one stream over loopback for a second; so the machine's
mood is the same for all, and the ratios are medians over rounds. The first of the five is a column
of its own: it follows an idle time, with cold caches and a congestion window that starts anew, and
the other rates, like iperf3's, are those of a path in use. The bytes of the first round are compared
on both sides. `--plot FILE.svg` draws the rates, and the CPU of both ends. What is not installed is
named and left out. The processes are those of `trinamo bench transfer`, which compares the same backends
without peers. Late event loops and idle connections are measured by `bench_transfer_idle.py`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from trinamo.cli.bench.transfer import BENCH_BACKENDS, open_pair
from trinamo.cli.bench.transfer_text import TransferRow, rows_svg

KINDS = ("tcp", "tcp crc32", "tcp plain", *BENCH_BACKENDS[1:])
IPERF3 = {"iperf3": (), "iperf3 -C reno": ("-C", "reno")}
PEERS = ("iperf3", "iperf3 -C reno", "nixl tcp", "mooncake tcp")
SMALL_BLOCKS, SMALL_BYTES, SMALL_ROUNDS = 16, 4096, 200
REPEATS = 4

Figures = dict[str, float]


class Pair:
    """The two ends of one backend, for large transfers and for single small blocks."""

    def __init__(self, kind: str, blocks: int, block_bytes: int, held: ExitStack) -> None:
        self.kind, self.blocks, self.gigabytes = kind, blocks, blocks * block_bytes / 1e9
        self.owner, self.mover = held.enter_context(open_pair(kind, blocks, block_bytes))
        self.small = held.enter_context(open_pair(kind, SMALL_BLOCKS, SMALL_BYTES))[1]

    def move(self, direction: str, *, check: bool = False) -> Figures:
        before = self.owner.ask("cpu")["cpu_s"]
        asked = {"direction": direction, "blocks": self.blocks, "rounds": 1 + REPEATS}
        found = self.mover.ask("run", **asked, lag=False, check=check)
        cpu_s = found["cpu_s"] + self.owner.ask("cpu")["cpu_s"] - before
        good = found["good"]
        if check and direction == "write":
            good = self.owner.ask("check", blocks=self.blocks)["good"]
        if not good:
            raise SystemExit(f"{self.kind} {direction}: WRONG BYTES")
        first_s, *more_s = found["took_s"]
        return {
            "rate": self.gigabytes / statistics.mean(more_s),
            "first": self.gigabytes / first_s,
            "cpu": cpu_s / self.gigabytes / (1 + REPEATS),
        }

    def latency_us(self, direction: str) -> float:
        asked = {"direction": direction, "blocks": 1, "rounds": SMALL_ROUNDS}
        found = self.small.ask("run", **asked, lag=False, check=False)
        return statistics.median(found["took_s"]) * 1e6


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def iperf3(*more: str) -> Figures | None:
    """One stream for a second, which is the least it takes."""
    if shutil.which("iperf3") is None:
        return None
    port = str(free_port())
    with subprocess.Popen(
        ["iperf3", "-s", "-1", "-B", "127.0.0.1", "-p", port], stdout=subprocess.DEVNULL
    ) as server:
        time.sleep(0.2)
        done = subprocess.run(
            ["iperf3", "-c", "127.0.0.1", "-p", port, "-t", "1", "-J", *more],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
        if done.returncode:
            server.kill()
            return None
    end = json.loads(done.stdout)["end"]
    rate = end["sum_received"]["bits_per_second"] / 8e9
    used = end["cpu_utilization_percent"]
    return {"rate": rate, "cpu": (used["host_total"] + used["remote_total"]) / 100 / rate}


def memcpy(blocks: int, block_bytes: int) -> Figures:
    source = np.ones((blocks, block_bytes), dtype=np.uint8)
    target = np.zeros_like(source)
    began, cpu = time.perf_counter(), time.process_time()
    np.copyto(target, source)
    gigabytes = source.nbytes / 1e9
    return {
        "rate": gigabytes / (time.perf_counter() - began),
        "cpu": (time.process_time() - cpu) / gigabytes,
    }


class Rounds:
    """Figures by row, one entry a round."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], list[Figures]] = {}
        self.latencies: dict[tuple[str, str], list[float]] = {}

    def add(self, kind: str, direction: str, found: Figures | None) -> None:
        if found is not None:
            self.rows.setdefault((kind, direction), []).append(found)

    def median(self, row: tuple[str, str], figure: str) -> float:
        return statistics.median(each[figure] for each in self.rows[row])

    def ratio(self, row: tuple[str, str], peer: str) -> str:
        """How many times the peer's rate, in the same direction where it has one."""
        theirs = self.rows.get((peer, row[1])) or self.rows.get((peer, ""))
        if not theirs or peer == row[0]:
            return ""
        pairs = zip(self.rows[row], theirs, strict=False)
        return f"{statistics.median(a['rate'] / b['rate'] for a, b in pairs):.2f}"

    def show(self) -> None:
        names = " | ".join(f"× {peer}" for peer in PEERS)
        print(f"| path | GB/s | after idle | CPU s/GB, both ends | 4 KB p50 µs | {names} |")
        print("|---" * (5 + len(PEERS)) + "|")
        for row, found in self.rows.items():
            first = f"{self.median(row, 'first'):.2f}" if "first" in found[0] else ""
            small = self.latencies.get(row)
            cells = [
                " ".join(row).strip(),
                f"{self.median(row, 'rate'):.2f}",
                first,
                f"{self.median(row, 'cpu'):.2f}",
                f"{statistics.median(small):.0f}" if small else "",
                *(self.ratio(row, peer) for peer in PEERS),
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


def open_pairs(kinds: list[str], open_one: Callable[[str], Pair]) -> list[Pair]:
    pairs = []
    for kind in kinds:
        try:
            pairs.append(open_one(kind))
        except RuntimeError as error:
            print(f"not here: {kind}: {error}")
    return pairs


def measure(pairs: list[Pair], rounds: int, blocks: int, block_bytes: int) -> Rounds:
    found = Rounds()
    for number in range(rounds + 1):
        is_first = number == 0  # It warms up, and its bytes are compared.
        for pair in pairs:
            for direction in ("read", "write"):
                figures = pair.move(direction, check=is_first)
                latency_us = pair.latency_us(direction)
                if not is_first:
                    found.add(pair.kind, direction, figures)
                    found.latencies.setdefault((pair.kind, direction), []).append(latency_us)
        if not is_first:
            for name, more in IPERF3.items():
                found.add(name, "", iperf3(*more))
            found.add("memcpy", "", memcpy(blocks, block_bytes))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--block-bytes", type=int, default=65536)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the rates")
    chosen = parser.parse_args()
    blocks, block_bytes = chosen.blocks, chosen.block_bytes
    with ExitStack() as held:
        pairs = open_pairs(chosen.kinds, lambda kind: Pair(kind, blocks, block_bytes, held))
        rounds = measure(pairs, chosen.rounds, blocks, block_bytes)
    rounds.show()
    if chosen.plot is not None:
        title = f"{blocks} scattered blocks of {block_bytes} bytes, median of {chosen.rounds}"
        rows = [
            TransferRow(
                *row,
                gb_per_s=rounds.median(row, "rate"),
                mover_s_per_gb=rounds.median(row, "cpu"),
                is_good=True,
            )
            for row in rounds.rows
        ]
        chosen.plot.write_text(rows_svg(rows, title), "utf-8")


if __name__ == "__main__":
    main()
