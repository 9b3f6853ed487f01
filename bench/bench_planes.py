"""The planes under load: a work queue whose consumers are killed, control operations, events.

Starts its own etcd and NATS on loopback. Unary requests and jobs over NATS also as a cluster with a secret
seals them, in turns with those in clear; both ends in one process. The queue: jobs over two consumer processes, of which one
is killed with -9 every second and replaced. Each consumer (`runtime/queues/consumer.py`) writes a
job's effect, under the job's id and attempt; so an effect may be written again by the next attempt,
but must be there for every job, once per attempt, and no job may be acked twice.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import trio
import trio.lowlevel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.conformance.requests.service import Service, result_of, unary  # noqa: E402
from tests.servers import session_etcd, session_nats  # noqa: E402
from trinamo.runtime.env import RealEnv  # noqa: E402
from trinamo.runtime.planes import LeasedJob, QueueLimits, RequestPlane, WorkQueue  # noqa: E402
from trinamo.runtime.protocol.queue.consumer import JobOutcome  # noqa: E402
from trinamo.runtime.queues.consumer import Consumer, ConsumerLimits, open_consumer  # noqa: E402
from trinamo.transports.etcd import open_etcd  # noqa: E402
from trinamo.transports.nats import NatsRequestPlane, NatsRequestServer, open_nats  # noqa: E402
from trinamo.transports.security.sealing import Sealer  # noqa: E402

QUEUE = "bench"
LIMITS = QueueLimits(visibility_timeout_s=2, attempts_max=100)
CONSUMERS = 2
JOBS_AT_A_TIME = 8
CONTROL_TURNS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=8_000)
    parser.add_argument("--consumer", nargs=2, metavar=("URL", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.consumer:
        trio.run(consume, options.consumer[0], Path(options.consumer[1]))
        return
    print("| what | result |\n|---|---|")
    with session_nats() as nats:
        trio.run(run_events, nats.url, options.events)
        trio.run(run_queue, nats.url, options.jobs)
        trio.run(run_taking, nats.url, options.jobs // 4)
        trio.run(run_sealed, nats.url, options.requests)
    with session_etcd() as etcd:
        trio.run(run_control, etcd.endpoint, options.operations)


def row(what: str, result: str) -> None:
    print(f"| {what} | {result} |", flush=True)


# --- the queue -------------------------------------------------------------------------------


class _Reporting(RealEnv):
    """Writes down how each job ended, as far as this process was told."""

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file

    def note(self, kind: str, /, **fields: Any) -> None:
        if kind == "queue.outcome":
            os.write(
                self._file, f"{fields['outcome']} {fields['job']} {fields['attempt']}\n".encode()
            )


async def consume(url: str, path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND)

    async def work(job: LeasedJob, _: bytes) -> None:
        # One write each, so that a kill leaves whole lines.
        os.write(file, f"effect {job.id} {job.attempt}\n".encode())

    async with (
        open_nats(url) as events,
        events.work_queue(QUEUE) as queue,
        open_consumer(
            queue,
            work,
            decode=bytes,
            env=_Reporting(file),
            limits=ConsumerLimits(jobs_max=JOBS_AT_A_TIME),
        ),
    ):
        await trio.sleep_forever()


def start_consumer(url: str, path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--consumer", url, str(path)])


async def run_queue(url: str, jobs: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "effects"
        path.touch()
        async with open_nats(url) as events, events.work_queue(QUEUE, limits=LIMITS) as queue:
            started = time.perf_counter()

            async def put(first: int) -> None:
                for number in range(first, jobs, 16):
                    await queue.put(f"job-{number}", b"x" * 128)

            async with trio.open_nursery() as nursery:
                for first in range(16):
                    nursery.start_soon(put, first)
            row("queue: put, 16 tasks", f"{jobs / (time.perf_counter() - started):,.0f} jobs/s")
            consumers = [start_consumer(url, path) for _ in range(CONSUMERS)]
            kills, started = 0, time.perf_counter()
            try:
                while (await queue.statistics()).depth:
                    await trio.sleep(1)
                    victim = consumers.pop(0)
                    victim.kill()
                    victim.wait()
                    kills += 1
                    consumers.append(start_consumer(url, path))
            finally:
                for each in consumers:
                    each.kill()
                    each.wait()
            elapsed = time.perf_counter() - started
            dead = len(await queue.dead_letters(count_max=jobs))
        lines = [tuple(line.split()) for line in path.read_text().splitlines()]
    attempts = Counter((job, attempt) for kind, job, attempt in lines if kind == "effect")
    effects = Counter(job for job, _ in attempts)
    acks = Counter(job for kind, job, _ in lines if kind == JobOutcome.DONE)
    row(
        f"queue: {jobs:,} jobs, {CONSUMERS} consumers, {kills} killed",
        f"{elapsed:.1f} s; jobs without effect {jobs - len(effects)}; "
        f"acked twice {sum(count > 1 for count in acks.values())}; "
        f"tried again {sum(effects.values()) - len(effects)}; "
        f"acks whose answer died with its consumer {jobs - len(acks)}; dead {dead}",
    )
    assert len(effects) == jobs
    # The fence: no attempt had two effects, and no job two acks.
    assert max(attempts.values()) == 1
    assert max(acks.values()) == 1
    assert dead == 0


async def run_taking(url: str, jobs: int) -> None:
    """One process, nothing killed: what the consumer costs on top of take and ack."""

    async def loop(queue: WorkQueue) -> None:
        async def take() -> None:
            while (job := await queue.take(wait_s=0)) is not None:
                await queue.ack(job)

        async with trio.open_nursery() as nursery:
            for _ in range(JOBS_AT_A_TIME):
                nursery.start_soon(take)

    async def consumer(queue: WorkQueue) -> None:
        async def work(_: LeasedJob, __: bytes) -> None:
            if consuming.counts.taken == jobs:
                consuming.drain()

        limits = ConsumerLimits(jobs_max=JOBS_AT_A_TIME)
        consuming = Consumer(queue, work, decode=bytes, env=RealEnv(), limits=limits)
        await consuming.run()

    async with open_nats(url) as events:
        for kind in (loop, consumer):
            async with events.work_queue(f"taking-{kind.__name__}", limits=LIMITS) as queue:
                for number in range(jobs):
                    await queue.put(f"job-{number}", b"x" * 128)
                started, cpu = time.perf_counter(), time.process_time()
                await kind(queue)
                elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
                assert (await queue.statistics()).depth == 0
            row(
                f"queue: taken and acked, {JOBS_AT_A_TIME} at a time, by a {kind.__name__}",
                f"{jobs / elapsed:,.0f}/s; {cpu / jobs * 1e6:.0f} µs CPU each",
            )


# --- what is sealed --------------------------------------------------------------------------


async def run_sealed(url: str, requests: int) -> None:
    """Requests of a prompt's size, and jobs, in clear and sealed in turns."""
    turns: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        calls: dict[str, Callable[[int], Awaitable[object]]] = {}
        for kind, secret in (("clear", b""), ("sealed", bytes(range(32)))):
            sealers = [Sealer([secret], random.Random(seed)) for seed in (1, 2)]
            one, other = [
                await stack.enter_async_context(open_nats(url, sealer=each)) for each in sealers
            ]
            server = NatsRequestServer(other, f"bench.{kind}", sealer=sealers[1])
            await nursery.start(server.serve, Service())
            plane = NatsRequestPlane(one, nursery, sealer=sealers[0])
            queue = await stack.enter_async_context(
                one.work_queue(f"bench-{kind}", limits=QueueLimits(duplicate_window_s=1))
            )
            calls |= _sealed_calls(kind, plane, server.address, queue)
        for _ in range(CONTROL_TURNS + 1):
            for kind, call in calls.items():
                tasks = 1 if "job" in kind else 32
                _, cost_s = await _time_calls(call, tasks, requests // CONTROL_TURNS // 32)
                turns.setdefault(kind, []).append(cost_s)
    for kind, (_, *costs) in turns.items():  # The first turn warms up.
        row(f"{kind}", f"{statistics.median(costs) * 1e6:.0f} µs CPU each")


def _sealed_calls(
    kind: str, plane: RequestPlane, address: str, queue: WorkQueue
) -> dict[str, Callable[[int], Awaitable[object]]]:
    ids = itertools.count()
    prompts = {size: b"x" * size for size in (100, 4_000)}

    async def request(size: int, _: int) -> None:
        await result_of(plane, address, unary(f"r{next(ids)}"), prompts[size])

    async def job(_: int) -> None:
        await queue.put(f"job-{next(ids)}", b"x" * 200)
        taken = await queue.take(wait_s=5)
        assert taken is not None
        await queue.ack(taken)

    return {
        **{f"requests: unary of {size} bytes, {kind}": partial(request, size) for size in prompts},
        f"queue: a job put, taken and acked, {kind}": job,
    }


# --- control and events ----------------------------------------------------------------------


async def run_control(endpoint: str, operations: int) -> None:
    """Puts and gets in turns; the middle turn counts, for the machine may have other work."""
    tasks = 32
    async with open_etcd([endpoint]) as control, control.watch("elsewhere/") as events:
        # As in every process a watch is open: gRPC's thread lives as long as any call does, and
        # is made anew otherwise. The put opens the stream.
        await anext(events)
        await control.put("elsewhere/a", b"")
        await anext(events)
        calls: dict[str, Callable[[int], Awaitable[object]]] = {
            "put": lambda number: control.put(f"bench/{number}", b"x" * 128),
            "get": lambda number: control.get(f"bench/{number}"),
        }
        turns: dict[str, list[tuple[float, float]]] = {kind: [] for kind in calls}
        count = operations // tasks // CONTROL_TURNS
        for _ in range(CONTROL_TURNS):
            for kind, call in calls.items():
                turns[kind].append(await _time_calls(call, tasks, count))
        for kind, found in turns.items():
            rates, costs = zip(*found, strict=True)
            row(
                f"control: {kind}, {tasks} tasks",
                f"{statistics.median(rates):,.0f}/s; {statistics.median(costs) * 1e6:.0f} µs CPU "
                f"each ({min(costs) * 1e6:.0f} to {max(costs) * 1e6:.0f})",
            )


async def _time_calls(
    call: Callable[[int], Awaitable[object]], tasks: int, count: int
) -> tuple[float, float]:
    """Calls a second, and CPU seconds of this process per call."""

    async def work(number: int) -> None:
        for _ in range(count):
            await call(number)

    started, cpu = time.perf_counter(), time.process_time()
    async with trio.open_nursery() as nursery:
        for number in range(tasks):
            nursery.start_soon(work, number)
    elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
    return tasks * count / elapsed, cpu / (tasks * count)


async def run_events(url: str, count: int) -> None:
    async with (
        open_nats(url) as events,
        events.subscribe("bench.events", pending_max=count) as subscription,
    ):
        started, cpu = time.perf_counter(), time.process_time()

        async def publish() -> None:
            for number in range(count):
                await events.publish("bench.events", b"x" * 128)
                # The outgoing buffer is bounded; give the connection its turns.
                while number % 64 == 0 and events.statistics().waiting_messages > 4096:
                    await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(publish)
            for _ in range(count):
                await anext(subscription)
        elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
        row(
            "events: published and received, one process",
            f"{count / elapsed:,.0f}/s; {cpu / count * 1e6:.0f} µs CPU each",
        )


if __name__ == "__main__":
    main()
