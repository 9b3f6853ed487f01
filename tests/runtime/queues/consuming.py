"""A queue, its consumer and their dice, for tests."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from trinamo.runtime.env import Clock, RealClock
from trinamo.runtime.planes import LeasedJob, QueueLimits
from trinamo.runtime.protocol.queue.consumer import Backoff
from trinamo.runtime.queues.consumer import Consumer, ConsumerLimits, open_consumer
from trinamo.transports.memory.events import MemoryBroker, MemoryWorkQueue

LIMITS = QueueLimits(visibility_timeout_s=9.0, attempts_max=3)
PACE = ConsumerLimits(jobs_max=2, backoff=Backoff(min_s=1.0, max_s=4.0))


class DiceEnv:
    """An environment that remembers its notes."""

    def __init__(self) -> None:
        self.clock: Clock = RealClock()
        self.rng = random.Random(1)
        self.notes: list[tuple[str, dict[str, Any]]] = []

    def note(self, kind: str, /, **fields: Any) -> None:
        self.notes.append((kind, fields))


@attrs.define
class Bench:
    """A broker with one queue, and what a handler has seen of it."""

    broker: MemoryBroker
    queue: MemoryWorkQueue
    env: DiceEnv = attrs.field(factory=DiceEnv)
    seen: list[tuple[str, int, float]] = attrs.field(factory=list)
    """Id, attempt, and when it was begun."""
    cancelled: list[str] = attrs.field(factory=list)
    consumer: Consumer[bytes] = attrs.field(init=False)
    """The last one that was opened."""

    def begin(self, job: LeasedJob) -> None:
        self.seen.append((job.id, job.attempt, trio.current_time()))

    async def work_for(self, job: LeasedJob, seconds: float) -> None:
        self.begin(job)
        try:
            await trio.sleep(seconds)
        except trio.Cancelled:
            self.cancelled.append(job.id)
            raise

    @asynccontextmanager
    async def consuming(
        self, handler: Callable[[LeasedJob, bytes], Any], limits: ConsumerLimits = PACE
    ) -> AsyncIterator[Consumer[bytes]]:
        async with open_consumer(
            self.queue, handler, decode=bytes, env=self.env, limits=limits
        ) as consumer:
            self.consumer = consumer
            yield consumer


async def until(condition: Callable[[], bool], *, seconds: float = 600) -> None:
    with trio.fail_after(seconds):
        while not condition():
            await trio.sleep(0.01)


def check_sums(consumer: Consumer[Any]) -> None:
    counts = consumer.counts
    assert counts.taken == counts.working + sum(counts.outcomes.values())
