"""A work queue through an outage: who puts, who works, and what became of every job."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.planes import EventPlane, LeasedJob, QueueLimits, WorkQueue
from trinamo.runtime.protocol.queue.consumer import Backoff
from trinamo.runtime.queues.consumer import ConsumerLimits, open_consumer

LIMITS: Final = QueueLimits(visibility_timeout_s=3, attempts_max=100)
PACE: Final = ConsumerLimits(jobs_max=4, backoff=Backoff(min_s=0.05, max_s=0.2))


class JobsEnv(RealEnv):
    """Keeps the notes of how each job ended."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(1)
        self.outcomes: dict[str, Counter[str]] = {}

    def note(self, kind: str, /, **fields: Any) -> None:
        if kind == "queue.outcome":
            self.outcomes.setdefault(fields["job"], Counter())[fields["outcome"]] += 1


class Jobs:
    """Jobs put one after the other, and two consumers that work on them."""

    def __init__(self, queue: WorkQueue) -> None:
        self.queue = queue
        self.put_ids: list[str] = []
        self.worked: Counter[str] = Counter()
        self._env = JobsEnv()

    @property
    def done(self) -> Counter[str]:
        """How often each job's ack was applied, as far as its consumer was told."""
        return Counter({job: ends["done"] for job, ends in self._env.outcomes.items()})

    @property
    def unsettled(self) -> dict[str, None]:
        """Jobs of which an ack was never answered, so that it may have been applied."""
        return {job: None for job, ends in self._env.outcomes.items() if ends["unsettled"]}

    async def put(self, *, per_s: float = 50.0) -> None:
        """Put jobs until cancelled; each again and again until it is known to be in."""
        number = 0
        while True:
            job_id = f"job-{number}"
            try:
                await self.queue.put(job_id, b"x" * 128)
            except TrinamoError:
                continue  # The id makes it safe.
            self.put_ids.append(job_id)
            number += 1
            await trio.sleep(1 / per_s)

    async def drained(self) -> None:
        """Wait until nothing is left in the queue."""
        while True:
            try:
                if not (await self.queue.statistics()).depth:
                    return
            except TrinamoError:
                pass
            await trio.sleep(0.1)

    async def _work(self, job: LeasedJob, _: bytes) -> None:
        self.worked[job.id] += 1
        await trio.sleep(0.01)

    @asynccontextmanager
    async def consumed(self) -> AsyncIterator[None]:
        """Two consumers work while inside."""
        async with (
            open_consumer(self.queue, self._work, decode=bytes, env=self._env, limits=PACE),
            open_consumer(self.queue, self._work, decode=bytes, env=self._env, limits=PACE),
        ):
            yield


@asynccontextmanager
async def open_jobs(plane: EventPlane, name: str) -> AsyncIterator[Jobs]:
    """A queue, and whoever works on it."""
    async with plane.work_queue(name, limits=LIMITS) as queue:
        jobs = Jobs(queue)
        async with jobs.consumed():
            yield jobs
