"""The planes under load: a work queue whose consumers are killed, control operations, events.

Starts its own etcd and NATS on loopback. The queue: jobs over two consumer processes, of which
one is killed with -9 every second and replaced. Each consumer writes a job's effect, under the
job's id, before it acks; so an effect may be written again by the next attempt, but must be there
for every job, and no job may be acked twice.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import trio
import trio.lowlevel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.servers import session_etcd, session_nats  # noqa: E402
from trinamo.runtime.planes import QueueLimits, Settlement  # noqa: E402
from trinamo.transports.etcd import open_etcd  # noqa: E402
from trinamo.transports.nats import open_nats  # noqa: E402

QUEUE = "bench"
LIMITS = QueueLimits(visibility_timeout_s=2, attempts_max=100)
CONSUMERS = 2
TAKERS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--consumer", nargs=2, metavar=("URL", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.consumer:
        trio.run(consume, options.consumer[0], Path(options.consumer[1]))
        return
    print("| what | result |\n|---|---|")
    with session_nats() as nats:
        trio.run(run_events, nats.url, options.events)
        trio.run(run_queue, nats.url, options.jobs)
    with session_etcd() as etcd:
        trio.run(run_control, etcd.endpoint, options.operations)


def row(what: str, result: str) -> None:
    print(f"| {what} | {result} |", flush=True)


# --- the queue -------------------------------------------------------------------------------


async def consume(url: str, path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND)

    async def work() -> None:
        while True:
            job = await queue.take(wait_s=5)
            if job is None:
                continue
            # One write each, so that a kill leaves whole lines.
            os.write(file, f"effect {job.id}\n".encode())
            outcome = await queue.ack(job)
            os.write(file, f"{outcome} {job.id}\n".encode())

    async with (
        open_nats(url) as events,
        events.work_queue(QUEUE) as queue,
        trio.open_nursery() as nursery,
    ):
        for _ in range(TAKERS):
            nursery.start_soon(work)


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
    effects = Counter(job for kind, job in lines if kind == "effect")
    acks = Counter(job for kind, job in lines if kind == Settlement.APPLIED)
    row(
        f"queue: {jobs:,} jobs, {CONSUMERS} consumers, {kills} killed",
        f"{elapsed:.1f} s; jobs without effect {jobs - len(effects)}; "
        f"acked twice {sum(count > 1 for count in acks.values())}; "
        f"tried again {sum(effects.values()) - len(effects)}; "
        f"acks whose answer died with its consumer {jobs - len(acks)}; dead {dead}",
    )
    assert len(effects) == jobs
    assert max(acks.values()) == 1
    assert dead == 0


# --- control and events ----------------------------------------------------------------------


async def run_control(endpoint: str, operations: int) -> None:
    tasks = 32
    async with open_etcd([endpoint]) as control:
        for kind in ("put", "get"):

            async def work(number: int, kind: str = kind) -> None:
                for _ in range(operations // tasks):
                    if kind == "put":
                        await control.put(f"bench/{number}", b"x" * 128)
                    else:
                        await control.get(f"bench/{number}")

            started, cpu = time.perf_counter(), time.process_time()
            async with trio.open_nursery() as nursery:
                for number in range(tasks):
                    nursery.start_soon(work, number)
            elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
            row(
                f"control: {kind}, {tasks} tasks",
                f"{operations / elapsed:,.0f}/s; {cpu / operations * 1e6:.0f} µs CPU each",
            )


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
