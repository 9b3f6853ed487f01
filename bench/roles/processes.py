"""Start the processes of a benchmark, talk to them, and sum up what they say."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROLES = Path(__file__).with_name("roles.py")


class Peer:
    """One child process that answers commands."""

    def __init__(self, role: str, *args: str, script: Path = ROLES) -> None:
        self.role = role
        self._process = subprocess.Popen(
            [sys.executable, str(script), role, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ready = self._read()

    def ask(self, do: str, **fields: object) -> dict:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.role} ended with status {self._process.wait()}")
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
    """A worker process and a client process of one kind: `trinamo` or `grpc`."""

    def __init__(self, kind: str, held: ExitStack) -> None:
        self.kind = kind
        self.worker = Peer(f"{kind}-worker")
        held.callback(self.worker.close)
        self.client = Peer(f"{kind}-client", self.worker.ready["address"])
        held.callback(self.client.close)

    def measure(self, do: str, count: int, **fields: object) -> dict[str, float]:
        """Rate, and CPU microseconds per unit of `count` on both sides."""
        before = self.worker.ask("cpu")["cpu_s"]
        client = self.client.ask(do, **fields)
        worker_s = self.worker.ask("cpu")["cpu_s"] - before
        return {
            "rate": count / client["wall_s"],
            "worker": worker_s / count * 1e6,
            "client": client["cpu_s"] / count * 1e6,
        }


@contextmanager
def open_pairs(kinds: Sequence[str]) -> Iterator[list[Pair]]:
    with ExitStack() as held:
        yield [Pair(kind, held) for kind in kinds]


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(percent / 100 * len(ordered)))]
