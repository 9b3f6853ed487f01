"""What many instances cost a frontend: a request, a new frontend, reports, what it tells of them.

python bench/serving/bench_fleet.py --sizes 1,64,512,1000

Many workers in few processes, each a whole runtime but for its connections to etcd and NATS, which
those of a process share; and one frontend after the other, by every policy. A request's figure is the
CPU time of its process, on a core that no worker uses: who else uses the machine slows the seconds down, and
hardly the microseconds.
With `--telling` workers tell their load once a second, which is for the column of an idle frontend:
what it takes for that is in the figures of its requests, too. With `--secret` connections and entries
are closed by one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import trio

# The servers are those of the tests, so that both mean the same by etcd and NATS.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from roles.processes import Peer

from tests.servers import session_etcd, session_nats
from trinamo.cli.serve.resources import settle_memory
from trinamo.cli.up.certs import write_secret
from trinamo.runtime.config.config import Config, load_config
from trinamo.runtime.context import Context
from trinamo.runtime.engines.echo import open_echo_engine
from trinamo.runtime.env import Env, RealEnv
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.http.models.models import ModelKind, RoutedEngine
from trinamo.runtime.http.service import HttpService
from trinamo.runtime.planes import ControlPlane, EventPlane
from trinamo.runtime.process.roles import FrontendReady, serve_frontend, serve_worker
from trinamo.runtime.process.runtime import Runtime
from trinamo.runtime.process.stopping import StopRequest
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest
from trinamo.runtime.sinks import Sink
from trinamo.transports.assembly.planes import RealTransports

SIZES = (1, 64, 512, 1000)
POLICIES = ("round_robin", "random", "power_of_two", "least_loaded", "kv")
WORKER_PROCESSES = 4
STARTING = 2
"""So many runtimes start at once in each of them."""
IN_FLIGHT = 16
SETTLED_S = 4.0
"""After so long what was asked of each worker that was new has been answered."""
IDLE_S = 5.0
ROUNDS = 5
PROMPT = "Prompt number {}, which begins as no other does, and then the same " + "word " * 40
SILENT = ("worker.status_port=null",)
TELLING = (*SILENT, "router.policy=least_loaded")
ASKED = ("http.port=0", "http.busy_waiting_tokens=1000000")
"""Frontends ask before each request whether all of them are busy."""


def read_config(texts: list[str]) -> Config:
    logging.getLogger("trinamo").setLevel(logging.ERROR)
    return load_config(environ={}, overrides=dict(text.split("=", 1) for text in texts))


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


# --- many workers in one process -----------------------------------------------------------------


class Shared(RealTransports):
    """One connection to etcd, and one to NATS, for all the runtimes of a process."""

    def __init__(self, control: ControlPlane, events: EventPlane) -> None:
        super().__init__()
        self._control, self._events = control, events

    @asynccontextmanager
    async def open_control(self, config: Config, env: Env) -> AsyncIterator[ControlPlane]:
        yield self._control

    @asynccontextmanager
    async def open_events(self, config: Config, env: Env) -> AsyncIterator[EventPlane]:
        yield self._events


async def work(count: int, config: Config) -> None:
    """Serve the same model `count` times, each by a runtime of its own, until killed."""
    starting, ready_count = trio.CapacityLimiter(STARTING), 0
    env, planes = RealEnv(), RealTransports()

    async def one(nursery: trio.Nursery) -> None:
        nonlocal ready_count
        ready = trio.Event()

        async def serve() -> None:
            async with open_echo_engine() as engine:
                parts = config, RealEnv(), Shared(control, events), engine, StopRequest()
                await serve_worker(*parts, ready=lambda _: ready.set())

        async with starting:
            nursery.start_soon(serve)
            await ready.wait()
        ready_count += 1
        if ready_count == count:
            say(ready=count)

    async with (
        planes.open_control(config, env) as control,
        planes.open_events(config, env) as events,
        trio.open_nursery() as nursery,
    ):
        for _ in range(count):
            nursery.start_soon(one, nursery)


# --- one frontend --------------------------------------------------------------------------------


class Counter(Sink[Delta]):
    """Takes whatever comes."""

    def take(self, items: list[Delta]) -> bool:
        return bool(items)


class Caller:
    """A frontend that asks itself, without HTTP: the same checks and choice, and the same engine."""

    def __init__(self, runtime: Runtime, service: HttpService) -> None:
        self.runtime, self.service = runtime, service
        self.asked = 0

    @property
    def engine(self) -> RoutedEngine:
        _, engine = self.service.model_manager().find(None, ModelKind.CHAT)
        assert isinstance(engine, RoutedEngine), "workers serve it"
        return engine

    async def ask(self) -> None:
        self.asked += 1
        engine = self.engine
        assert engine.is_there, "nobody is there"
        assert engine.has_instance, "nobody is well"
        assert not self.service.admission.is_busy(engine), "nobody is busy"
        prompt = PROMPT.format(self.asked)
        request = GenerateRequest(model="echo", prompt=prompt, max_tokens=1)
        await engine.forward(request, Context(self.runtime.clients[0].new_id()), Counter())

    async def round(self, count: int, in_flight: int) -> float:
        """CPU seconds of each of so many requests, so many at a time."""
        goal, began = self.asked + count, time.process_time()

        async def ask() -> None:
            while self.asked < goal:
                await self.ask()

        async with trio.open_nursery() as nursery:
            for _ in range(in_flight):
                nursery.start_soon(ask)
        return (time.process_time() - began) / count

    async def first(self) -> None:
        while True:
            try:
                return await self.ask()
            except (TrinamoError, AssertionError):
                await trio.sleep(0.005)

    def known(self) -> int:
        """Instances whose entry and card are known."""
        clients = self.runtime.clients
        return len(clients[0].router.instances) if clients else 0


@contextmanager
def timed(into: dict[str, float], name: str) -> Iterator[None]:
    """Seconds, and seconds of CPU, of what is inside."""
    began, cpu = time.perf_counter(), time.process_time()
    yield
    into[f"{name}_s"] = time.perf_counter() - began
    into[f"{name}_cpu_s"] = time.process_time() - cpu


async def call(size: int, config: Config, requests: int) -> None:
    """Open a frontend, and measure it; its figures are printed."""
    found: dict[str, float] = {}
    opened: list[Caller] = []
    stop, ready = StopRequest(), trio.Event()
    where: list[FrontendReady] = []

    def note(runtime: Runtime, service: HttpService) -> None:
        opened.append(Caller(runtime, service))

    def is_ready(facts: FrontendReady) -> None:
        settle_memory(maps_bodies=True)
        where.append(facts)
        ready.set()

    async def serve() -> None:
        parts = config, RealEnv(), RealTransports(), stop
        await serve_frontend(*parts, opened=note, ready=is_ready)

    async with trio.open_nursery() as nursery:
        with timed(found, "all"):
            with timed(found, "first"):
                nursery.start_soon(serve)
                while not opened:
                    await trio.sleep(0.005)
                (caller,) = opened
                await caller.first()
            while caller.known() < size:
                await trio.sleep(0.005)
        await ready.wait()
        with timed(found, "touch"):
            for _ in range(2):
                await caller.round(max(size, 64), IN_FLIGHT)
        await trio.sleep(SETTLED_S)
        with timed(found, "idle"):
            await trio.sleep(IDLE_S)
        found["idle_cpu_percent"] = 100 * found["idle_cpu_s"] / found["idle_s"]
        for name, in_flight in (("one", 1), ("many", IN_FLIGHT)):
            rounds = [await caller.round(requests, in_flight) * 1e6 for _ in range(ROUNDS)]
            found[f"{name}_us"] = statistics.median(rounds)
        found["connections"] = count_links(caller.runtime.data.request_planes["tcp"])
        await told(caller, where[0], found)
        say(**found)
        nursery.cancel_scope.cancel()


def count_links(plane: Any) -> int:
    count: int = plane.connection_count
    return count


async def told(caller: Caller, facts: FrontendReady, found: dict[str, float]) -> None:
    """What a look at `/status` and `/metrics` costs, and how much there is."""
    for name in ("status", "metrics"):
        fetch = partial(caller.runtime.http.fetch, f"{facts.url}/{name}", timeout_s=30)
        with timed(found, name):
            _, body = await fetch()
        found[f"{name}_kb"], found[f"{name}_ms"] = len(body) / 1000, found[f"{name}_cpu_s"] * 1000


# --- the table -----------------------------------------------------------------------------------

COLUMNS = {
    "one request µs": ("one_us", 0),
    "of 16 at once µs": ("many_us", 0),
    "first answer s": ("first_s", 2),
    "knows all s": ("all_s", 2),
    "CPU until then s": ("all_cpu_s", 2),
    "links": ("connections", 0),
    "idle % of a core": ("idle_cpu_percent", 1),
    "/status kB": ("status_kb", 0),
    "ms": ("status_ms", 0),
    "/metrics kB": ("metrics_kb", 0),
    "ms ": ("metrics_ms", 0),
}


def shown(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """One line; how its requests compare with those at the first size."""
    first = next(each for each in rows if each["policy"] == row["policy"])
    ratio, of_many = (row[each] / first[each] for each in ("one_us", "many_us"))
    cells = [f"{row[key]:,.{digits}f}" for key, digits in COLUMNS.values()]
    return f"| {row['size']} | {row['policy']} | {ratio:.2f}, {of_many:.2f} | {' | '.join(cells)} |"


def start(role: str, count: int, requests: int, texts: list[str]) -> Peer:
    """A process that says a line once it is ready, or done."""
    return Peer(role, str(count), str(requests), *texts, script=Path(__file__))


def split(count: int) -> list[int]:
    shares = [count // WORKER_PROCESSES] * WORKER_PROCESSES
    for number in range(count % WORKER_PROCESSES):
        shares[number] += 1
    return [share for share in shares if share]


def measure(options: argparse.Namespace, texts: list[str], held: list[Peer]) -> None:
    rows: list[dict[str, Any]] = []
    running, told = 0, TELLING if options.telling else SILENT
    for size in options.sizes:
        began = time.perf_counter()
        with ThreadPoolExecutor() as pool:
            shares = split(size - running)
            held += pool.map(lambda share: start("workers", share, 0, [*texts, *told]), shares)
        running = size
        print(f"{size} workers after {time.perf_counter() - began:.1f} s", file=sys.stderr)
        for policy in options.policies:
            asked = [*texts, *ASKED, f"router.policy={policy}"]
            peer = start("frontend", size, options.requests, asked)
            peer.close()
            rows.append({"size": size, "policy": policy, **peer.ready})
            print(shown(rows[-1], rows), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), "utf-8")


def own_core(role: str) -> None:
    """A frontend has the last core to itself: elsewhere no thousand workers run in its caches either."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[-1:] if role == "frontend" else cores[:-1])


async def play(role: str, count: int, requests: int, config: Config) -> None:
    own_core(role)
    if role == "workers":
        await work(count, config)
    else:
        await call(count, config, requests)


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    if sys.argv[1:2] in (["workers"], ["frontend"]):
        role, count, requests, *texts = sys.argv[1:]
        trio.run(play, role, int(count), int(requests), read_config(texts))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=numbers, default=SIZES, help="from few to many")
    parser.add_argument("--policies", type=lambda text: text.split(","), default=POLICIES)
    parser.add_argument("--requests", type=int, default=2000, help="in each of the rounds")
    parser.add_argument("--telling", action="store_true", help="workers tell their load")
    parser.add_argument("--secret", action="store_true", help="the cluster has a secret")
    parser.add_argument("--quick", action="store_true", help="hardly anything")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.policies, options.requests = (1, 8), ("round_robin",), 64
    print(f"| instances | policy | × the first | {' | '.join(COLUMNS)} |")
    print("|---" * (len(COLUMNS) + 3) + "|", flush=True)
    held: list[Peer] = []
    with session_etcd() as etcd, session_nats() as nats, TemporaryDirectory() as folder:
        places = [
            f"control_plane.etcd.endpoints={etcd.endpoint}",
            f"event_plane.nats.servers={nats.url}",
        ]
        if options.secret:
            write_secret(Path(folder, "secret"))
            places.append(f"security.secret_file={folder}/secret")
        try:
            measure(options, places, held)
        finally:
            for each in held:
                each.signal(signal.SIGKILL)
                each.close()


if __name__ == "__main__":
    main()
