"""Consumers of a real queue: killed processes, and settlements cut short."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.servers import SessionNats
from tests.sources import ROOT
from tests.transports.nats.brokers import PATIENT, private_server
from trinamo.conformance.control import until
from trinamo.runtime.env import RealEnv
from trinamo.runtime.planes import LeasedJob, QueueLimits, Settlement, WorkQueue
from trinamo.runtime.protocol.queue.consumer import Backoff
from trinamo.runtime.queues.consumer import ConsumerLimits, open_consumer
from trinamo.runtime.queues.queues import Queues
from trinamo.transports.nats import open_nats
from trinamo.transports.servers.binaries import find_nats_server

LIMITS = QueueLimits(visibility_timeout_s=5, attempts_max=50)
PACE = ConsumerLimits(jobs_max=4, backoff=Backoff(min_s=0.05, max_s=0.2))
JOBS = 150
MODULE = "tests.transports.nats.test_queue_consumers"
_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    return f"consumers-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
async def queue(nats_server: SessionNats, name: str) -> AsyncIterator[WorkQueue]:
    with trio.fail_after(120):
        async with (
            open_nats([nats_server.url], PATIENT) as plane,
            plane.work_queue(name, limits=LIMITS) as queue,
        ):
            yield queue


class Reporting(RealEnv):
    """Writes down how each job ended, as far as the process was told."""

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file

    def note(self, kind: str, /, **fields: Any) -> None:
        os.write(self._file, f"{fields['outcome']} {fields['job']} {fields['attempt']}\n".encode())


async def consume(url: str, name: str, path: str) -> None:
    """The consumer process: an effect is one line, under the job's id and attempt."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND)

    async def handle(job: LeasedJob, _: bytes) -> None:
        await trio.sleep(0.01)
        # One write each, so that a kill leaves whole lines.
        os.write(file, f"effect {job.id} {job.attempt}\n".encode())

    async with (
        open_nats([url], PATIENT) as plane,
        plane.work_queue(name) as queue,
        open_consumer(queue, handle, decode=bytes, env=Reporting(file), limits=PACE),
    ):
        await trio.sleep_forever()


class Crew:
    """Two consumer processes and what they wrote."""

    def __init__(self, url: str, name: str, path: Path) -> None:
        path.touch()
        self._path = path
        self._command = [sys.executable, "-m", MODULE, url, name, str(path)]
        self.processes = [self.start() for _ in range(2)]

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, cwd=ROOT)

    def lines(self, kind: str) -> list[tuple[str, ...]]:
        """Job and attempt of every line of a kind."""
        lines = [line.split() for line in self._path.read_text().splitlines()]
        return [tuple(words[1:]) for words in lines if words[0] == kind]

    async def advance(self, effects: int = 10) -> None:
        before = len(self.lines("effect"))
        while len(self.lines("effect")) < before + effects:
            await trio.sleep(0.01)

    def end(self) -> None:
        for each in self.processes:
            each.kill()
            each.wait()


async def test_jobs_of_consumers_killed_or_frozen_are_done_once_by_those_that_live(
    nats_server: SessionNats, queue: WorkQueue, name: str, tmp_path: Path
) -> None:
    for number in range(JOBS):
        await queue.put(f"job-{number}", b"")
    crew = Crew(nats_server.url, name, tmp_path / "effects")
    try:
        await crew.advance()
        victim = crew.processes.pop(0)
        victim.kill()
        victim.wait()
        crew.processes.append(crew.start())
        await crew.advance()
        # Its leases are over by the time it wakes up, and what it held is done by the other.
        frozen = crew.processes[0]
        frozen.send_signal(signal.SIGSTOP)
        while (await queue.statistics()).depth:
            await trio.sleep(0.1)
        frozen.send_signal(signal.SIGCONT)
        for number in range(10):
            await queue.put(f"more-{number}", b"")
        while (await queue.statistics()).depth:
            await trio.sleep(0.1)
    finally:
        crew.end()
    jobs = {f"job-{number}" for number in range(JOBS)} | {f"more-{number}" for number in range(10)}
    effects = crew.lines("effect")
    assert {job_id for job_id, _ in effects} == jobs
    # No attempt has two effects and no job two acks; only what the victims held was done again.
    assert max(Counter(effects).values()) == 1
    assert max(Counter(job_id for job_id, _ in crew.lines("done")).values()) == 1
    assert len(effects) <= len(jobs) + 2 * PACE.jobs_max
    assert await queue.dead_letters() == []


async def test_a_settlement_that_was_cancelled_anywhere_may_be_repeated(queue: WorkQueue) -> None:
    """Either the first one was applied to its end, or the second one is: never neither."""
    for turn in range(40):
        await queue.put(f"job-{turn}", b"")
        job = await queue.take(wait_s=120)
        assert job is not None
        results: list[Settlement] = []
        # An ack is two requests of a fraction of a millisecond each.
        with trio.move_on_after(turn * 0.0001):
            results.append(await queue.ack(job))
        if not results:
            results.append(await queue.ack(job))
        assert results == [Settlement.APPLIED], turn
    assert (await queue.statistics()).depth == 0


async def test_a_queue_lost_with_the_server_s_disk_is_made_again_and_consumed(
    tmp_path: Path,
) -> None:
    stored = tmp_path / "jetstream"
    done: list[str] = []

    async def handle(job: LeasedJob, _: bytes) -> None:
        done.append(job.id)

    with private_server(find_nats_server(), "-js", "-sd", str(stored)) as server:
        async with open_nats([server.url], PATIENT) as plane:
            queues = Queues(plane, RealEnv(), read_interval_s=0.1)
            async with (
                queues.consume("work", handle, decode=bytes, queue_limits=LIMITS, limits=PACE),
                queues.open("work") as queue,
            ):
                await queue.put("before", b"")
                await until(lambda: done == ["before"])
                server.kill()
                shutil.rmtree(stored)
                await trio.to_thread.run_sync(server.start)
                with trio.fail_after(120):
                    await queue.put("after", b"", timeout_s=60)
                await until(lambda: done == ["before", "after"])


if __name__ == "__main__":
    trio.run(consume, sys.argv[1], sys.argv[2], sys.argv[3])
