"""Start the processes of a benchmark, talk to them, and sum up what they say."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import peers

ROLES = Path(__file__).with_name("roles.py")


def before() -> dict:
    """The interpreter and the roles of another checkout, where BENCH_BEFORE says one is; else empty.

    It needs a `.venv` and a `bench/` of its own that know the same commands.
    """
    checkout = os.environ.get("BENCH_BEFORE")
    if not checkout:
        return {}
    roles = Path(checkout) / "bench" / "roles" / "roles.py"
    return {"python": Path(checkout) / ".venv" / "bin" / "python", "script": roles}


def cpu_s(pid: int) -> float:
    """The CPU seconds of a process until now, user and kernel, threads that have ended included."""
    return time.clock_gettime(~pid << 3 | 2)  # CPUCLOCK_SCHED of linux/posix-timers.h


def rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Server:
    """A child process that serves until it is ended; what it says goes to `log`."""

    def __init__(
        self,
        command: Sequence[object],
        *,
        environ: Mapping[str, str],
        log: Path,
        reads: bool = False,
    ) -> None:
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [str(each) for each in command],
                env={**os.environ, **environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if reads else file,
                stderr=file,
                start_new_session=True,
            )
        self.log = log
        self.pid = self.process.pid
        self.ready: dict = {}
        if reads:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit(f"{command} did not start; see {log}")
            self.ready = json.loads(line)

    def cpu_s(self) -> float:
        return cpu_s(self.pid)

    def close(self) -> None:
        """Ask it to leave, and end it if it does not."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(8)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Peer:
    """One child process that answers commands."""

    def __init__(
        self,
        role: str,
        *args: str,
        script: Path = ROLES,
        python: Path | str = sys.executable,
        environ: Mapping[str, str] | None = None,
        is_quiet: bool = False,
    ) -> None:
        self.role = role
        self._process = subprocess.Popen(
            [str(python), str(script), role, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if is_quiet else None,
            env={**os.environ, **(environ or {})},
            text=True,
        )
        self.ready = self._read()

    def ask(self, do: str, **fields: object) -> dict:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def _read(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.role} ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Pair:
    """A worker process and a client process of one kind: `trinamo`, `grpc` or `dynamo`.

    `sealed` is trinamo with a secret, and `before` that of another checkout.
    """

    def __init__(self, kind: str, held: ExitStack) -> None:
        self.kind = kind
        where = held.enter_context(dynamo_place()) if kind == "dynamo" else {}
        if kind == "sealed":
            kind, where = (
                "trinamo",
                {"environ": {"BENCH_SECRET": "a secret of benchmarks, of no cluster"}},
            )
        if kind == "before":
            kind, where = "trinamo", before()
        self.worker = Peer(f"{kind}-worker", **where)
        held.callback(self.worker.close)
        self.client = Peer(f"{kind}-client", self.worker.ready["address"], **where)
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
def dynamo_place() -> Iterator[dict]:
    """The interpreter and environment of one cluster of Dynamo: its processes meet in a directory."""
    with tempfile.TemporaryDirectory(prefix="trinamo-bench-dynamo-") as directory:
        environ = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": directory,
            "DYN_EVENT_PLANE": "zmq",
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_LOG": "error",
            "HF_HUB_OFFLINE": "1",
        }
        # Its caller logs a line for each request, which no setting of it turns off.
        yield {"python": peers.python(), "environ": environ, "is_quiet": True}


@contextmanager
def open_pairs(kinds: Sequence[str]) -> Iterator[list[Pair]]:
    with ExitStack() as held:
        yield [Pair(kind, held) for kind in kinds]


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {
        key: statistics.median(each[key] for each in rounds)
        for key in rounds[0]
        if all(key in each for each in rounds)
    }


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(percent / 100 * len(ordered)))]
