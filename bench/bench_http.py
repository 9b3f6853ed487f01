"""HTTP end to end, client to frontend to worker: CPU per token and per request, and when they come.

trinamo as it is deployed (`trinamo frontend`, a worker, an etcd), Dynamo beside it (its Rust frontend
and a Python worker), `trinamo frontend --upstream` and two routers in Rust before one and the same
cheap upstream, and two bare servers
that make the tokens themselves: a function on uvicorn, and a trio loop that does nothing but the
system calls. All are asked the same by the same load, in turns; medians of the rounds are shown.

CPU is per token of every process by itself, the request included; for unary requests per request.
What is not installed (`python bench/peers.py install`) is left out. With BENCH_BEFORE, the
directory of another checkout, that one is measured in the same run. `--tls` measures trinamo alone,
in clear text and behind TLS, both asked through a tunnel, whose CPU is not counted. `--kind trinamo
--kind sealed` measures what `security.secret_file` costs between frontend and worker.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import peers
from load.load import body, raise_descriptors, run_load
from roles.processes import ROLES, Server, before, dynamo_place, medians, rss_mb

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.certificates import Authority
from trinamo.cli.up.certs import write_secret

READY_S = 30.0
FULL = ("trinamo", "before", "dynamo")
ROUTERS = ("sglang", "vllm")
DIRECT = ("direct",)
BARE = ("uvicorn", "floor")
SEALED = ("sealed",)
TUNNELLED = ("plain", "tls", "plain-before", "tls-before")
TLS_LOADS = ("unary16", "short", "sleeps64")
KINDS = FULL + DIRECT + ROUTERS + BARE
LIMITS = {
    "TRINAMO_HTTP__REQUESTS_MAX": "8192",
    "TRINAMO_HTTP__CONNECTIONS_MAX": "16384",
    "TRINAMO_WORKER__REQUESTS_MAX": "8192",
    "TRINAMO_DATA_PLANE__TCP__SUBJECTS_MAX": "8192",
    "TRINAMO_EVENT_PLANE__BACKEND": "memory",
    "TRINAMO_WORKER__STATUS_PORT": "0",
    "TRINAMO_LOG__LEVEL": "warning",
}


class Load(NamedTuple):
    """One row: what is asked, so many times at once."""

    name: str
    connections: int
    tokens: int
    each: int = 1
    pause_s: float = 0.0
    by_itself: bool = False
    stream: bool = True
    spread_s: float = 0.0
    """Within which they arrive; at once without it."""
    kinds: tuple[str, ...] = FULL
    tokens_of: dict[str, int] = {}
    """Where fewer are enough, because they take longer."""

    def quick(self) -> Load:
        """Hardly anything, to see that it works."""
        return self._replace(
            connections=min(self.connections, 16),
            tokens=min(self.tokens, 10),
            each=min(self.each, 3),
        )


LOADS = {
    "unary16": Load("unary, 16 at once", 16, 1, each=50, stream=False),
    "unary64": Load("unary, 64 at once", 64, 1, each=20, stream=False, kinds=KINDS),
    "short": Load("streams of 8 tokens, 64 at once", 64, 8, each=12),
    "steps64": Load("64 streams, 20 ms, tokens together", 64, 120, pause_s=0.02, kinds=KINDS),
    "steps256": Load("256 streams, 20 ms, tokens together", 256, 120, pause_s=0.02, kinds=KINDS),
    "steps512": Load("512 streams, 20 ms, tokens together", 512, 100, pause_s=0.02),
    "sleeps64": Load("64 streams, 20 ms, each by itself", 64, 120, pause_s=0.02, by_itself=True),
    "sleeps256": Load("256 streams, 20 ms, each by itself", 256, 120, pause_s=0.02, by_itself=True),
    "burst": Load(
        "bursts, 64 streams",
        64,
        2000,
        kinds=KINDS,
        tokens_of={"dynamo": 400, "sglang": 1000, "vllm": 1000},
    ),
    "open5000": Load(
        "5,000 open streams, 5 tokens/s each",
        5000,
        120,
        pause_s=0.2,
        spread_s=10,
        kinds=("trinamo",),
    ),
}


class System:
    """Processes that answer HTTP on one port; `sides` are those that are measured, the first is asked."""

    def __init__(
        self,
        kind: str,
        port: int,
        sides: dict[str, Server],
        models: Sequence[str],
        offers: Sequence[str] = (),
    ) -> None:
        self.kind = kind
        self.port = port
        self.sides = sides
        self.models = models
        wait_for(port, offers or models)

    def model(self, load: Load) -> str:
        steps = load.stream and load.pause_s > 0 and not load.by_itself
        return self.models[-1 if steps else 0]

    def measure(self, load: Load) -> dict[str, float]:
        """What came of one round, with the CPU of each side in microseconds per token or request."""
        tokens = load.tokens_of.get(self.kind, load.tokens)
        marks: dict[int, tuple[int, dict[str, float]]] = {}

        # The worker of the other model only idles.
        idle = {f"worker {each}" for each in self.models if each != self.model(load)}
        sides = {side: server for side, server in self.sides.items() if side not in idle}

        def cpu() -> dict[str, float]:
            return {side: server.cpu_s() for side, server in sides.items()}

        lag = read_lag(self.port) if self.kind == "trinamo" else {}
        start = cpu()
        found = run_load(
            self.port,
            body(
                self.model(load),
                tokens=tokens,
                pause_s=load.pause_s,
                by_itself=load.by_itself,
                stream=load.stream,
            ),
            connections=load.connections,
            each=load.each,
            spread_s=load.spread_s,
            marked=lambda number, so_far: marks.update({number: (so_far, cpu())}),
        )
        after = cpu()
        if lag:
            found["lag_p99_ms"] = lag_p99_ms(lag, read_lag(self.port))
        wanted = load.connections * load.each * tokens
        found["lost"] = wanted - found["tokens"]
        items = found["tokens"] if load.stream else found["requests"]
        found["rate"] = items / found["wall_s"] if found["wall_s"] else 0.0
        for side, server in sides.items():
            found[f"{side}_us"] = (after[side] - start[side]) / max(items, 1) * 1e6
            found[f"{side}_rss_mb"] = rss_mb(server.pid)
            if load.each == 1 and 2 in marks and marks[2][0] > marks[1][0]:
                spent = marks[2][1][side] - marks[1][1][side]
                found[f"{side}_steady_us"] = spent / (marks[2][0] - marks[1][0]) * 1e6
        found["sum_us"] = sum(found[f"{side}_us"] for side in sides)
        found["load_us"] = found["cpu_s"] / max(items, 1) * 1e6
        return found


def read_lag(port: int) -> dict[float, float]:
    """Samples of the frontend's event-loop lag so far, by the upper bound of their bucket in seconds."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(r'trinamo_event_loop_lag_seconds_bucket{.*?le="(.+?)".*?} (\S+)', text)
    return {float(bound): float(count) for bound, count in found}


def lag_p99_ms(before: dict[float, float], after: dict[float, float]) -> float:
    """The bound of the bucket that 99 % of the samples between the two are in."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    most = counts[max(counts)]
    bound = next(bound for bound, count in counts.items() if count >= 0.99 * most)
    # Beyond the last bound nothing is known but that.
    return (bound if bound < math.inf else 2 * sorted(counts)[-2]) * 1e3


def wait_for(port: int, models: Sequence[str]) -> None:
    """Until every model is offered."""
    deadline = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2) as answer:
                offered = {each["id"] for each in json.load(answer)["data"]}
            if offered.issuperset(models):
                return
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise SystemExit(f"nobody on port {port} offers {models}")
        time.sleep(0.1)


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def open_system(kind: str, *, trinamo: Sequence[str] = ("plain", "steps")) -> Iterator[System]:
    """The processes of one kind, for as long as the context is open; logs stay in the temporary place."""
    with ExitStack() as held:
        directory = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="trinamo-bench-")))

        def start(
            *arguments: object,
            python: Path | str = sys.executable,
            environ: Mapping[str, str] | None = None,
            reads: bool = False,
            **_: object,
        ) -> Server:
            command = [python, *arguments]
            server = Server(command, environ=environ or {}, log=directory / "log", reads=reads)
            held.callback(server.close)
            return server

        port, models = free_port(), ["bench"]
        if kind in ("trinamo", "before", *SEALED, *TUNNELLED):
            etcd = start(ROLES, "trinamo-control", reads=True)
            environ = {**LIMITS, "TRINAMO_CONTROL_PLANE__ETCD__ENDPOINTS": etcd.ready["address"]}
            where = before() if kind.endswith("before") else {}
            roles, where = where.pop("script", ROLES), {**where, "environ": environ}
            trust: list[object] = []
            if kind in SEALED:
                write_secret(directory / "secret")
                environ["TRINAMO_SECURITY__SECRET_FILE"] = str(directory / "secret")
            if kind.startswith("tls"):
                authority = Authority.make(directory)
                certificate, key = authority.sign("server")
                environ["TRINAMO_HTTP__TLS__CERTIFICATE_FILE"] = str(certificate)
                environ["TRINAMO_HTTP__TLS__KEY_FILE"] = str(key)
                trust = [authority.ca_file]
            behind = free_port() if kind in TUNNELLED else port
            sides = {"frontend": start(roles, "trinamo-http-frontend", behind, **where)}
            if kind in TUNNELLED:
                start(ROLES, "tunnel", port, behind, *trust)
            models = list(trinamo)
            workers = [start(roles, "trinamo-http-worker", each, **where) for each in models]
            sides |= {f"worker {name}": each for name, each in zip(models, workers, strict=True)}
        elif kind == "dynamo":
            place = held.enter_context(dynamo_place())
            arguments = ("dynamo.frontend", "--http-port", port, "--discovery-backend", "file")
            sides = {
                "frontend": start("-m", *arguments, **place),
                "worker": start(ROLES, "dynamo-http-worker", **place),
            }
        elif kind in DIRECT:
            upstream = free_port()
            behind = start(ROLES, "upstream", upstream, python=upstream_python())
            wait_for(upstream, models)
            command = ("-m", "trinamo.cli", "frontend", "--port", port)
            url = f"http://127.0.0.1:{upstream}/v1"
            sides = {"frontend": start(*command, "--upstream", url, environ=LIMITS)}
            sides["worker"] = behind
        elif kind in ROUTERS:
            upstream = free_port()
            behind = start(ROLES, "upstream", upstream, python=peers.python())
            wait_for(upstream, models)
            sides = {"frontend": start("-m", *router(kind, port, upstream), python=peers.python())}
            sides["worker"] = behind
        else:
            python = peers.python() if kind == "uvicorn" else sys.executable
            sides = {"frontend": start(ROLES, kind, port, python=python)}
        # That router names no model that its upstream does not describe at length.
        offers = ["unknown"] if kind == "sglang" else models
        yield System(kind, port, sides, models, offers)


def upstream_python() -> Path | str:
    """With uvloop, if the peers are there."""
    return peers.python() if peers.python().exists() else sys.executable


def router(kind: str, port: int, upstream: int) -> list[object]:
    shared = ["--host", "127.0.0.1", "--port", port, "--policy", "round_robin"]
    shared += ["--worker-urls", f"http://127.0.0.1:{upstream}", "--log-level", "error"]
    if kind == "sglang":
        return ["sglang_router.launch_router", *shared, "--prometheus-port", free_port()]
    return ["vllm_router.launch_router", *shared, "--prometheus-port", free_port()]


def installed(kinds: Sequence[str]) -> list[str]:
    needs = {"dynamo": "ai-dynamo", "sglang": "sglang-router", "vllm": "vllm-router"}
    needs["uvicorn"] = "uvicorn"
    found = [kind for kind in kinds if kind not in needs or peers.has(needs[kind])]
    return [kind for kind in found if not kind.endswith("before") or before()]


def run(names: Sequence[str], kinds: Sequence[str], *, rounds: int, is_quick: bool = False) -> dict:
    """The median of every load and kind, `{load: {kind: figures}}`, rounds in turns."""
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    with ExitStack() as held:
        systems = [held.enter_context(open_system(kind)) for kind in kinds]
        for system in systems:
            system.measure(Load("warm-up", 8, 8, each=20, kinds=(system.kind,)))
            if "BENCH_PROFILE" in os.environ and system.kind == "trinamo":
                for server in system.sides.values():
                    server.process.send_signal(signal.SIGUSR1)
        for name in names:
            load = LOADS[name].quick() if is_quick else LOADS[name]
            measured = [each for each in systems if each.kind in (*load.kinds, *SEALED, *TUNNELLED)]
            for _ in range(1 if name == "open5000" else rounds):
                for system in measured:
                    found = system.measure(load)
                    results.setdefault(name, {}).setdefault(system.kind, []).append(found)
            show(name, {kind: medians(each) for kind, each in results[name].items()})
    return {
        name: {kind: medians(each) for kind, each in by_kind.items()}
        for name, by_kind in results.items()
    }


def show(name: str, by_kind: dict[str, dict[str, float]]) -> None:
    for kind, found in by_kind.items():
        frontend = found["frontend_us"]
        worker = found["sum_us"] - frontend
        print(
            f"| {LOADS[name].name} | {kind} | {found['rate']:,.0f} | {frontend:.1f} | {worker:.1f} "
            f"| {found['itl_p99_ms']:.1f} | {found['ttft_p50_ms']:.0f} "
            f"| {found['frontend_rss_mb']:.0f} | {found['errors'] + found['missing']:.0f} |",
            flush=True,
        )


def check(results: dict) -> None:
    """Raise `SystemExit` if anything was lost or refused."""
    for name, by_kind in results.items():
        for kind, found in by_kind.items():
            wrong = {
                key: found[key] for key in ("errors", "short", "missing", "lost") if found[key]
            }
            if wrong:
                raise SystemExit(f"{kind}, {LOADS[name].name}: {wrong}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", choices=LOADS, action="append", help="only this; repeatable")
    parser.add_argument("--kind", choices=(*KINDS, *SEALED), action="append")
    parser.add_argument("--tls", action="store_true", help="trinamo in clear text and behind TLS")
    parser.add_argument(
        "--quick", action="store_true", help="hardly anything, to see that it works"
    )
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args()
    raise_descriptors()
    kinds = installed(TUNNELLED if options.tls else options.kind or KINDS)
    loads = options.load or list(TLS_LOADS if options.tls else LOADS)
    print(
        "| load | server | items/s | frontend µs | worker µs | ITL p99 ms | TTFT p50 ms | RSS MB | errors |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    rounds = 1 if options.quick else options.rounds
    results = run(loads, kinds, rounds=rounds, is_quick=options.quick)
    if options.quick:
        check(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), "utf-8")


if __name__ == "__main__":
    main()
