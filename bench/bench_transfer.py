"""KV transfers between two processes: GB/s and CPU seconds per GB of both sides together.

64 MB as 1,024 scattered blocks of 64 KB by default, rounds of all backends interleaved, the bytes
of the first round compared on both sides. Beside them iperf3 with one stream over loopback, and
memcpy. With `--lag` 256 MB move while both event loops measure how late they wake up.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from processes import percentile

ROLES = Path(__file__).with_name("transfer_roles.py")
KINDS = ("tcp", "tcp-crc32", "tcp-plain", "same-host", "same-host-verified")


class End:
    """One process that answers commands."""

    def __init__(self, *args: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ROLES), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ready = self._read()

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Pair:
    """The two ends of one backend."""

    def __init__(self, kind: str, blocks: int, block_bytes: int, held: ExitStack) -> None:
        self.kind, self.gigabytes = kind, blocks * block_bytes / 1e9
        sizes = (str(blocks), str(block_bytes))
        self.owner = End("owner", kind, *sizes)
        held.callback(self.owner.close)
        self.initiator = End("initiator", kind, *sizes, self.owner.ready["description"])
        held.callback(self.initiator.close)

    def move(self, direction: str, seed: int, *, check: bool = False) -> dict[str, Any]:
        before = self.owner.ask("cpu")["cpu_s"]
        found = self.initiator.ask(direction, seed=seed, check=check)
        cpu_s = found["cpu_s"] + self.owner.ask("cpu")["cpu_s"] - before
        if check and found["crc"] != self.owner.ask("crc", blocks=found["there"])["crc"]:
            raise SystemExit(f"{self.kind} {direction}: WRONG BYTES")
        return {
            "rate": self.gigabytes / found["wall_s"],
            "cpu": cpu_s / self.gigabytes,
            "path": found["path"],
        }


def iperf3(seconds: float) -> tuple[float, float] | None:
    """GB/s and CPU seconds per GB of both sides."""
    if shutil.which("iperf3") is None:
        return None
    with subprocess.Popen(
        ["iperf3", "-s", "-1", "-p", "45201"], stdout=subprocess.DEVNULL
    ) as server:
        time.sleep(0.3)
        done = subprocess.run(
            ["iperf3", "-c", "127.0.0.1", "-p", "45201", "-t", str(seconds), "-J"],
            capture_output=True,
            text=True,
            check=True,
        )
        server.wait(5)
    end = json.loads(done.stdout)["end"]
    rate = end["sum_received"]["bits_per_second"] / 8e9
    used = end["cpu_utilization_percent"]
    return rate, (used["host_total"] + used["remote_total"]) / 100 / rate


def memcpy(blocks: int, block_bytes: int) -> float:
    source = np.ones((blocks, block_bytes), dtype=np.uint8)
    target = np.zeros_like(source)
    best = []
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(target, source)
        best.append(source.nbytes / 1e9 / (time.perf_counter() - started))
    return statistics.median(best)


def lag(kind: str) -> None:
    with ExitStack() as held:
        pair = Pair(kind, 4096, 65536, held)
        pair.move("read", 1)
        for end in (pair.initiator, pair.owner):
            end.ask("lags")
        for direction in ("read", "write"):
            found = pair.initiator.ask(direction, seed=3)
            lags = found["lags"]
            print(
                f"| {kind} {direction} 256 MB | loop lag ms p50 {percentile(lags, 50) * 1e3:.2f} "
                f"| p99 {percentile(lags, 99) * 1e3:.2f} | max {lags[-1] * 1e3:.2f} "
                f"| {found['count']} wake-ups |"
            )
        lags = pair.owner.ask("cpu")["lags"]
        print(
            f"| {kind} owner | | p99 {percentile(lags, 99) * 1e3:.2f} | max {lags[-1] * 1e3:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--block-bytes", type=int, default=65536)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--lag", action="store_true", help="measure the event loops' lag, too")
    chosen = parser.parse_args()
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    peers = []
    with ExitStack() as held:
        pairs = [Pair(kind, chosen.blocks, chosen.block_bytes, held) for kind in chosen.kinds]
        for number in range(chosen.rounds + 1):
            for pair in pairs:
                for direction in ("read", "write"):
                    found = pair.move(direction, number * 10, check=number == 0)
                    if number:  # The first round warms up and compares the bytes.
                        rows.setdefault((pair.kind, direction), []).append(found)
            if number % 4 == 1:
                peers.append(iperf3(1.0))
    print("| backend | path | GB/s median | best | CPU s/GB, both sides |")
    print("|---|---|---|---|---|")
    for (kind, direction), found in rows.items():
        rates = [each["rate"] for each in found]
        cpu = statistics.median(each["cpu"] for each in found)
        print(
            f"| {kind} {direction} | {found[0]['path']} | {statistics.median(rates):.2f} "
            f"| {max(rates):.2f} | {cpu:.2f} |"
        )
    known = [each for each in peers if each is not None]
    if known:
        rate = statistics.median(each[0] for each in known)
        cpu = statistics.median(each[1] for each in known)
        print(f"| iperf3, one stream | | {rate:.2f} | {max(k[0] for k in known):.2f} | {cpu:.2f} |")
    print(f"| memcpy | | {memcpy(chosen.blocks, chosen.block_bytes):.2f} | | |", flush=True)
    if chosen.lag:
        for kind in chosen.kinds:
            lag(kind)


if __name__ == "__main__":
    main()
