"""A consumer of a work queue: takes jobs, keeps their leases while a handler works, settles them.

`open_consumer` is the way in. What to do with a job is
decided in `protocol/queue/consumer.py`. What this module does not do: make the effect of a job
happen once. The queue promises that at most one ack per job is applied, so let the effect depend on
the job's id and attempt (`docs/queues.md` says how); a handler that was cancelled because its lease
was lost may have done its work already.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, Generic, TypeVar

import attrs
import trio

from ..context import Context
from ..env import Env
from ..errors import TrinamoError
from ..logs.text import tell_causes
from ..nurseries import is_failure, open_nursery
from ..planes import LeasedJob, Settlement, WorkQueue
from ..protocol.queue.consumer import (
    Ack,
    Backoff,
    ConsumerCounts,
    HeldLease,
    JobOutcome,
    WorkEnd,
    outcome_of,
    verdict_on,
)
from ..traces.ring import Traces
from ..traces.trace import Leg

_log = logging.getLogger("trinamo.consumer")
_TAKE_WAIT_S: Final = 5.0
_BROKER_PAUSE_S: Final = (0.1, 0.5)
"""How long to wait after the broker refused a take; at random in between."""
T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Job(LeasedJob):
    """A job as a handler gets it: one attempt."""

    context: Context = attrs.field(eq=False, repr=False)
    """Give it to whatever the handler asks of workers, or puts into queues: that is then found by
    the request's id, and `context.traceparent` is of this attempt. Its id is that of the request
    that put the job, or else the job's."""


@attrs.define(eq=False)
class _Work:
    """A job in hand, and how the work on it ended, in words for its dead letter."""

    job: Job
    lease: HeldLease
    ending: WorkEnd = WorkEnd.STOPPED
    reason: str = ""
    error: BaseException | None = None
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """Round the handler; cancelled when the lease is lost."""

    def fail(self, ending: WorkEnd, reason: str, error: BaseException) -> None:
        self.ending, self.reason, self.error = ending, reason, error


@attrs.frozen(kw_only=True)
class ConsumerLimits:
    """The bounds of one consumer."""

    jobs_max: int = attrs.field(
        default=8, validator=[attrs.validators.ge(1), attrs.validators.le(1024)]
    )
    """How many jobs are worked on at a time."""
    backoff: Backoff = attrs.field(factory=Backoff)
    """How long a job that failed waits for its next attempt."""
    settle_timeout_s: float = attrs.field(default=10.0, validator=attrs.validators.gt(0))
    """How long an ack or nak is tried; until the lease ends, if that is later."""
    drain_timeout_s: float = attrs.field(default=30.0, validator=attrs.validators.ge(0))
    """How long handlers may take to finish once the consumer is drained."""
    return_timeout_s: float = attrs.field(default=2.0, validator=attrs.validators.ge(0))
    """How long jobs in hand are given back for when the consumer is cancelled or that time is up.
    This, and no more, is what leaving may take once it was cancelled."""


@asynccontextmanager
async def open_consumer(
    queue: WorkQueue,
    handler: Callable[[Job, T], Awaitable[object]],
    *,
    decode: Callable[[bytes], T],
    env: Env,
    limits: ConsumerLimits | None = None,
    on_outcome: Callable[[JobOutcome], None] | None = None,
    traces: Traces | None = None,
) -> AsyncIterator[Consumer[T]]:
    """Consume `queue` while inside; leaving drains it, see `Consumer.drain`.

    Args:
        queue: Where the jobs come from.
        handler: Called with each job and its decoded payload. Returning means done. Any
            error means failed: the job is tried again after `limits.backoff`, until its
            attempts are used up. It is cancelled when the job's lease is lost.
        decode: Makes a value of the payload, `bytes` for none; whatever error it raises
            means that this consumer cannot read the job.
        env: Where jitter and notes come from.
        limits: The bounds.
        on_outcome: Told how each job ended, synchronously; for whoever counts.
        traces: Where each attempt at a job leaves a leg, under the id of the request that put it or
            else under the job's.

    Cancelled, or left by an exception, handlers are cancelled and their jobs given back, for
    `return_timeout_s` at most.
    """
    limits = limits or ConsumerLimits()
    traces = traces or Traces(env.clock, 0)
    consumer = Consumer(queue, handler, decode, env, limits, on_outcome, traces)
    async with open_nursery() as nursery:
        nursery.start_soon(consumer.run)
        yield consumer
        consumer.drain()


@attrs.define(eq=False)
class Consumer(Generic[T]):
    """Works on at most `jobs_max` jobs of a queue at a time, until drained or cancelled.

    While the broker is away handlers go on for as long as their leases last, then they are
    cancelled: somebody else may have the job by then. Nothing here ends because of the broker.
    """

    _queue: WorkQueue
    _handler: Callable[[Job, T], Awaitable[object]]
    _decode: Callable[[bytes], T]
    _env: Env
    _limits: ConsumerLimits
    _on_outcome: Callable[[JobOutcome], None] | None
    _traces: Traces
    _is_draining: trio.Event = attrs.field(factory=trio.Event, init=False)
    _taking: dict[trio.CancelScope, None] = attrs.field(factory=dict, init=False)
    _is_refused: bool = attrs.field(default=False, init=False)
    counts: ConsumerCounts = attrs.field(factory=ConsumerCounts, init=False)
    """What was done so far."""

    def drain(self) -> None:
        """Take nothing more, and let `run` end once every handler has.

        What is still in hand after `drain_timeout_s` is given back. Synchronous; doing it again, or
        before `run`, does no harm.
        """
        self._is_draining.set()
        for scope in self._taking:
            scope.cancel()

    async def run(self) -> None:
        """Consume until drained. Cancelled, it gives back what it holds and loses no job.

        Raises only what a handler raises that is meant for the process: `KeyboardInterrupt`.
        """

        async def fill_slot() -> None:
            while not self._is_draining.is_set():
                asked_at, job = trio.current_time(), await self._take()
                if job is not None:
                    await self._work(job, asked_at)

        async def bound_drain(slots: trio.CancelScope) -> None:
            await self._is_draining.wait()
            await trio.sleep(self._limits.drain_timeout_s)
            slots.cancel()

        async with open_nursery() as nursery:
            async with open_nursery() as slots:
                nursery.start_soon(bound_drain, slots.cancel_scope)
                for _ in range(self._limits.jobs_max):
                    slots.start_soon(fill_slot)
            nursery.cancel_scope.cancel()

    async def _take(self) -> LeasedJob | None:
        """One job, or None for whatever reason there is none right now."""
        with trio.CancelScope() as scope:
            self._taking[scope] = None
            try:
                job = await self._queue.take(wait_s=_TAKE_WAIT_S)
            except TrinamoError as error:
                self.counts.broker_errors += 1
                # Said once per outage, not once per slot and try.
                level = logging.DEBUG if self._is_refused else logging.WARNING
                self._is_refused = True
                _log.log(level, "queue %s gives no jobs: %s; trying on", self._queue.name, error)
                await trio.sleep(self._env.rng.uniform(*_BROKER_PAUSE_S))
                return None
            finally:
                del self._taking[scope]
            self._is_refused = False
            return job
        return None

    # --- one job ---

    async def _work(self, job: LeasedJob, asked_at: float) -> None:
        """Work on a job, settle it and count it, whatever happens."""
        self.counts.take()
        lease = HeldLease.taken(
            self._queue.limits.visibility_timeout_s, asked_at=asked_at, now=trio.current_time()
        )
        context, leg = self._begin(job)
        ours = Job(**attrs.asdict(job, recurse=False), context=context)
        work, outcome = _Work(ours, lease), JobOutcome.UNSETTLED
        try:
            if not self._is_draining.is_set():
                await self._attempt(work)
            # Keep trying to ack until the lease ends, also while the broker is away.
            left_s = lease.left_s(trio.current_time())
            outcome = await self._settle(work, max(self._limits.settle_timeout_s, left_s))
        except BaseException:
            # Cancelled, or worse: let somebody else have it now rather than when the lease expires.
            # Work that is finished is not for others to do again. Shielded, but bounded.
            with trio.move_on_after(self._limits.return_timeout_s, shield=True):
                outcome = await self._settle(work, self._limits.return_timeout_s)
            raise
        finally:
            self.counts.end(outcome)
            leg.finish("success" if outcome is JobOutcome.DONE else outcome.value)
            self._tell(work, outcome)
            if self._on_outcome is not None:
                self._on_outcome(outcome)

    def _begin(self, job: LeasedJob) -> tuple[Context, Leg]:
        context = Context(job.origin.request_id or job.id)
        context.trace = self._traces.begin(context.id, job.origin.traceparent)
        leg = context.trace.begin("job", queue=self._queue.name, job=job.id, attempt=job.attempt)
        if job.attempt == 1:
            # Later ones have waited while those before them were worked on: their legs say that.
            context.trace.precede("wait", job.queued_s, queue=self._queue.name, job=job.id)
        return context, leg

    async def _attempt(self, work: _Work) -> None:
        """Run the handler for as long as the lease is ours."""
        try:
            body = self._decode(work.job.payload)
        except BaseException as error:
            if not is_failure(error):
                raise
            work.fail(WorkEnd.UNREADABLE, f"it does not decode: {tell_causes(error)}", error)
            return
        async with open_nursery() as nursery:
            nursery.start_soon(self._keep, work)
            await self._handle(work, body)
            nursery.cancel_scope.cancel()

    async def _handle(self, work: _Work, body: T) -> None:
        try:
            with work.scope:
                await self._handler(work.job, body)
                work.ending = WorkEnd.FINISHED
                return
        except BaseException as error:
            if is_failure(error):
                work.fail(WorkEnd.RAISED, tell_causes(error), error)
                return
            if isinstance(error, BaseExceptionGroup):
                # Cancelled from outside, and failed while it cleaned up: only the first goes on.
                _, rest = error.split(is_failure)
                assert rest is not None
                raise rest from None
            raise
        work.ending = WorkEnd.LEASE_LOST

    async def _keep(self, work: _Work) -> None:
        """Extend the lease, again and again; when that fails, end the work."""
        job, lease = work.job, work.lease
        while not lease.is_over(trio.current_time()):
            await trio.sleep_until(lease.extend_at)
            asked_at = trio.current_time()
            left_s = lease.left_s(asked_at)
            try:
                with trio.move_on_after(left_s):
                    if await self._queue.extend(job, timeout_s=left_s) is not Settlement.APPLIED:
                        break
                    lease.extended(asked_at=asked_at)
                    self.counts.extensions += 1
            except TrinamoError as error:
                self.counts.broker_errors += 1
                lease.not_extended(trio.current_time())
                _log.debug("queue %s: job %s not extended: %s", self._queue.name, job.id, error)
        work.scope.cancel()

    async def _settle(self, work: _Work, timeout_s: float) -> JobOutcome:
        job = work.job
        verdict = verdict_on(
            work.ending,
            reason=work.reason,
            attempt=job.attempt,
            backoff=self._limits.backoff,
            chance=self._env.rng.random(),
        )
        settlement: Settlement | None = None
        try:
            if isinstance(verdict, Ack):
                settlement = await self._queue.ack(job, timeout_s=timeout_s)
            elif verdict is not None:
                settlement = await self._queue.nak(
                    job, delay_s=verdict.delay_s, reason=verdict.reason, timeout_s=timeout_s
                )
        except TrinamoError as error:
            self.counts.broker_errors += 1
            _log.debug("queue %s: job %s not settled: %s", self._queue.name, job.id, error)
        return outcome_of(work.ending, settlement)

    def _tell(self, work: _Work, outcome: JobOutcome) -> None:
        """Log and note how a job ended; one that is given up for good, once and with all there is."""
        job = work.job
        where = (self._queue.name, job.id, job.attempt)
        self._env.note("queue.outcome", job=job.id, attempt=job.attempt, outcome=outcome.value)
        match outcome:
            case JobOutcome.DEAD:
                text = "queue %s: job %s is a dead letter after %d attempts: %s"
                _log.error(text, *where, work.reason or "given back", exc_info=work.error)
            case JobOutcome.FAILED | JobOutcome.UNDECODABLE:
                _log.debug("queue %s: job %s failed in attempt %d: %s", *where, work.reason)
            case JobOutcome.LOST:
                _log.warning("queue %s: the lease of job %s, attempt %d, was lost", *where)
            case JobOutcome.UNSETTLED:
                _log.warning(
                    "queue %s: what became of job %s, attempt %d, the broker did not say", *where
                )
            case JobOutcome.DONE | JobOutcome.RETURNED:
                pass
