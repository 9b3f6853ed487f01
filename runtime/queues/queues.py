"""The work queues a process uses: opened, consumed, counted, and looked at now and then.

`Queues` belongs to the runtime (`Runtime.queues`). A queue opened here counts what this process does
with it, and while it is open its depth and age are read from the broker every few seconds; both are
what `/metrics` shows: nothing is asked when it is scraped, while the broker is away the last numbers
stay, and `…_statistics_age_seconds` says how old they are. What this module does not do: work on jobs
(`consumer.py`), or keep them (`transports`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import attrs
import trio

from ..context import Context
from ..env import Clock, Env
from ..errors import TrinamoError, UnavailableError
from ..metrics.tallies import Registry, Row
from ..nurseries import open_nursery
from ..planes import (
    NO_ORIGIN,
    EventPlane,
    JobOrigin,
    LeasedJob,
    PutResult,
    QueueLimits,
    QueueStatistics,
    Settlement,
    WorkQueue,
)
from ..protocol.queue.consumer import JobOutcome
from ..traces.ring import Traces
from .consumer import Consumer, ConsumerLimits, Job, open_consumer

_log = logging.getLogger("trinamo.queues")
READ_INTERVAL_S: Final = 5.0
SHOWN_MAX: Final = 64
"""How many queues of one process are counted by name; more work all the same."""
FAILED: Final = "failed"
T = TypeVar("T")


@attrs.define
class QueueTally:
    """What this process did with a queue, and what it last knew of it."""

    operations: dict[tuple[str, str], int] = attrs.field(factory=dict)
    """By operation (`put`, `take`, `extend`, `ack`, `nak`) and the word it was answered with."""
    outcomes: dict[JobOutcome, int] = attrs.field(factory=lambda: dict.fromkeys(JobOutcome, 0))
    """What became of the jobs that consumers here took."""
    consumers: list[Consumer[Any]] = attrs.field(factory=list)
    """Those that run now."""
    handles: int = 0
    """How often it is open now."""
    statistics: QueueStatistics | None = None
    """As last read; stays while the broker is away, ends when the queue is closed."""
    read_at: float = 0.0
    """When that was, on the environment's clock."""

    @property
    def working(self) -> int:
        return sum(consumer.counts.working for consumer in self.consumers)

    def count(self, operation: str, result: str) -> None:
        key = (operation, result)
        self.operations[key] = self.operations.get(key, 0) + 1


class CountedQueue:
    """A `WorkQueue` that counts how its operations are answered and writes a leg for each put.

    Everything else is the queue's.
    """

    def __init__(self, queue: WorkQueue, tally: QueueTally, traces: Traces) -> None:
        self._queue = queue
        self._tally = tally
        self._traces = traces
        self.name = queue.name
        self.statistics, self.requeue = queue.statistics, queue.requeue
        self.dead_letters, self.dead_letter = queue.dead_letters, queue.dead_letter
        self.purge_dead = queue.purge_dead

    @property
    def limits(self) -> QueueLimits:
        return self._queue.limits

    @property
    def last_ready(self) -> int:
        """Jobs that nobody had taken when the queue was last read; 0 before that."""
        statistics = self._tally.statistics
        return 0 if statistics is None else statistics.ready

    async def put(
        self,
        job_id: str,
        payload: bytes,
        *,
        context: Context | None = None,
        origin: JobOrigin = NO_ORIGIN,
        timeout_s: float = 10.0,
    ) -> PutResult:
        """As `WorkQueue.put`. The job is a part of the request that `context` is of, if one is given.

        A handler gives its own context, the handler of a job `job.context`; `origin` is for whoever
        has only what a request left behind. Without either the job begins a trace of its own.
        """
        if context is None:
            trace = self._traces.begin(origin.request_id or job_id, origin.traceparent)
        else:
            trace = context.trace
            origin = JobOrigin(request_id=context.id)
        with trace.begin("put", queue=self.name, job=job_id) as leg:
            # Where no spans are made the caller's own context goes on.
            origin = attrs.evolve(origin, traceparent=leg.traceparent or trace.traceparent)
            step = self._queue.put(job_id, payload, origin=origin, timeout_s=timeout_s)
            result = await self._counted("put", step)
            leg.tell(result=result.value)
        return result

    async def take(self, *, wait_s: float) -> LeasedJob | None:
        try:
            job = await self._queue.take(wait_s=wait_s)
        except TrinamoError:
            self._tally.count("take", FAILED)
            raise
        if job is not None:
            self._tally.count("take", "leased")
        return job

    async def extend(self, job: LeasedJob, *, timeout_s: float = 10.0) -> Settlement:
        return await self._counted("extend", self._queue.extend(job, timeout_s=timeout_s))

    async def ack(self, job: LeasedJob, *, timeout_s: float = 10.0) -> Settlement:
        return await self._counted("ack", self._queue.ack(job, timeout_s=timeout_s))

    async def nak(
        self,
        job: LeasedJob,
        *,
        delay_s: float = 0.0,
        reason: str = "",
        timeout_s: float = 10.0,
    ) -> Settlement:
        return await self._counted(
            "nak", self._queue.nak(job, delay_s=delay_s, reason=reason, timeout_s=timeout_s)
        )

    async def _counted(self, operation: str, step: Awaitable[_Answer]) -> _Answer:
        try:
            result = await step
        except TrinamoError:
            self._tally.count(operation, FAILED)
            raise
        self._tally.count(operation, result.value)
        return result


_Answer = TypeVar("_Answer", PutResult, Settlement)


class Queues:
    """The queues of one process."""

    def __init__(
        self,
        events: EventPlane,
        env: Env,
        *,
        read_interval_s: float = READ_INTERVAL_S,
        traces: Traces | None = None,
        metrics: Registry | None = None,
    ) -> None:
        self._events = events
        self._metrics = metrics
        """Where the queues are shown; None: nowhere."""
        self._no_traces = Traces(env.clock, 0)
        self._traces = traces or self._no_traces
        self._env = env
        self._read_interval_s = read_interval_s
        self.tallies: dict[str, QueueTally] = {}
        """What was counted, by the names of the queues; `SHOWN_MAX` of them at most."""

    @asynccontextmanager
    async def open(
        self,
        name: str,
        *,
        limits: QueueLimits | None = None,
        read_interval_s: float | None = None,
        has_legs: bool = True,
    ) -> AsyncIterator[CountedQueue]:
        """Open a queue as `EventPlane.work_queue` does, counted and shown while inside.

        Its depth is read every `read_interval_s` seconds or a little more or less, a time that
        whoever decides by it may want to be short. `trinamo trace JOB` finds each put here, unless
        whoever puts writes the legs.

        A queue opened with `limits` that the broker has lost, with the disk of its server, is made
        again, empty, as soon as that is noticed.
        """
        async with self._events.work_queue(name, limits=limits) as queue:
            tally = self._tally(name)
            tally.handles += 1
            try:
                async with open_nursery() as nursery:
                    interval_s = read_interval_s or self._read_interval_s
                    nursery.start_soon(self._look, queue, tally, limits, interval_s)
                    yield CountedQueue(queue, tally, self._traces if has_legs else self._no_traces)
                    nursery.cancel_scope.cancel()
            finally:
                tally.handles -= 1
                if not tally.handles:
                    # Nobody looks any more, so what it was soon says nothing.
                    tally.statistics = None

    @asynccontextmanager
    async def consume(
        self,
        name: str,
        handler: Callable[[Job, T], Awaitable[object]],
        *,
        decode: Callable[[bytes], T],
        queue_limits: QueueLimits | None = None,
        limits: ConsumerLimits | None = None,
        has_legs: bool = True,
    ) -> AsyncIterator[Consumer[T]]:
        """Open a queue and work on its jobs while inside; leaving drains. See `open_consumer`.

        `trinamo trace JOB` finds the attempts at a job here, unless its handler writes the legs.
        """
        async with self.open(name, limits=queue_limits, has_legs=has_legs) as queue:
            tally = self._tally(name)

            def count(outcome: JobOutcome) -> None:
                tally.outcomes[outcome] += 1

            opened: Consumer[T] | None = None
            try:
                async with open_consumer(
                    queue,
                    handler,
                    decode=decode,
                    env=self._env,
                    limits=limits,
                    on_outcome=count,
                    traces=self._traces if has_legs else self._no_traces,
                ) as opened:
                    tally.consumers.append(opened)
                    yield opened
            finally:
                # Only now, because what it still has in hand while it drains counts too.
                if opened is not None:
                    tally.consumers.remove(opened)

    def _tally(self, name: str) -> QueueTally:
        tally = self.tallies.get(name)
        if tally is None:
            tally = QueueTally()
            if len(self.tallies) < SHOWN_MAX:
                self.tallies[name] = tally
                if self._metrics is not None:
                    _show(self._metrics, self._env.clock, name, tally)
            else:
                _log.warning("queue %s is not shown: %d others are", name, SHOWN_MAX)
        return tally

    async def _look(
        self, queue: WorkQueue, tally: QueueTally, limits: QueueLimits | None, interval_s: float
    ) -> None:
        """Read depth and age, for as long as the queue is open."""
        is_away = False
        while True:
            try:
                await self._read(queue, tally, limits)
                is_away = False
            except TrinamoError as error:
                if not is_away:
                    _log.warning(
                        "queue %s cannot be read: %s; its last numbers stay", queue.name, error
                    )
                is_away = True
            # Processes that started together must not ask together for ever.
            await trio.sleep(interval_s * self._env.rng.uniform(0.8, 1.2))

    async def _read(self, queue: WorkQueue, tally: QueueTally, limits: QueueLimits | None) -> None:
        try:
            found = await queue.statistics()
        except UnavailableError:
            if limits is None:
                raise
            async with self._events.work_queue(queue.name, limits=limits):
                found = await queue.statistics()
            _log.error("queue %s was gone and is made again; its jobs are lost", queue.name)
        tally.statistics, tally.read_at = found, self._env.clock.now()


def _show(metrics: Registry, clock: Clock, name: str, tally: QueueTally) -> None:
    """Add a queue to the page; its name is the application's, and at most `SHOWN_MAX` are shown."""

    def of_queues(shown: Mapping[str, QueueTally]) -> Iterator[Row]:
        for queue, each in shown.items():
            numbers: dict[str, float] = {"working": each.working}
            if (told := each.statistics) is not None:
                numbers["oldest_age_seconds"] = told.oldest_age_s
                numbers["statistics_age_seconds"] = clock.now() - each.read_at
            yield (queue,), numbers

    metrics.readings(
        "queue_",
        ("queue", "state"),
        lambda shown: [
            ((queue, state), {"jobs": getattr(each.statistics, state)})
            for queue, each in shown.items()
            if each.statistics is not None
            for state in ("ready", "leased", "dead")
        ],
        gauges={"jobs": "Jobs in the queue, as last read"},
    ).shown[name] = tally
    metrics.readings(
        "queue_",
        ("queue",),
        of_queues,
        gauges={
            "oldest_age_seconds": "How long ago the oldest job neither done nor dead was put,"
            " as last read",
            "statistics_age_seconds": "How long ago the broker was last asked with success",
            "working": "Jobs that this process works on",
        },
    ).shown[name] = tally
    metrics.readings(
        "queue_",
        ("queue", "operation", "result"),
        lambda shown: [
            ((queue, *asked), {"operations": count})
            for queue, each in shown.items()
            for asked, count in each.operations.items()
        ],
        counters={"operations": "What this process asked of the queue, by answer"},
    ).shown[name] = tally
    metrics.readings(
        "queue_",
        ("queue", "outcome"),
        lambda shown: [
            ((queue, outcome.value), {"outcomes": count})
            for queue, each in shown.items()
            for outcome, count in each.outcomes.items()
        ],
        counters={"outcomes": "What became of the jobs that consumers of this process took"},
    ).shown[name] = tally
