"""What a work queue is: jobs, leases, attempts, dead letters. The model every transport obeys.

`WorkQueueModel` is the specification of `planes.WorkQueue` as a plain object: time comes in as a
number, tokens come in as text. The memory transport is this model on trio's clock; the NATS one
keeps the same promises in JetStream, and one conformance suite holds both to them.

A job is ready, leased, acked or dead, and only these steps lead from one to another:

* put: a new id becomes ready;
* take: ready becomes leased, under a token, for `visibility_timeout_s`;
* extend: leased stays leased, from now on for another `visibility_timeout_s`;
* ack: leased becomes acked, and is gone;
* nak, or the lease expires: leased becomes ready again, or dead if its attempts are used up;
* requeue: dead becomes ready, with all its attempts.

The token is the fence: a step that names a token whose lease has expired changes nothing and is
answered `STALE`. So whoever makes a job's effect depend on `APPLIED` has it once per job.
"""

from __future__ import annotations

import enum
import heapq
from typing import Final

import attrs

from ...errors import OverloadedError
from .jobs import (
    EXPIRED,
    NO_ORIGIN,
    REASON_CHARS_MAX,
    DeadLetter,
    JobOrigin,
    LeasedJob,
    PutResult,
    QueueLimits,
    QueueStatistics,
    Settlement,
    check_delay,
    check_job_id,
)

_SEEN_MAX: Final = 1_000_000


@attrs.define
class QueueCounts:
    """What ever happened. `entered == depth + acked + died` at every moment."""

    entered: int = 0
    """Jobs put or queued again; duplicates are not among them."""
    acked: int = 0
    died: int = 0
    expired: int = 0
    """Leases that expired."""


class _State(enum.Enum):
    READY = enum.auto()
    DELAYED = enum.auto()
    LEASED = enum.auto()


@attrs.define(eq=False)
class _Job:
    id: str
    payload: bytes
    number: int
    """Order of arrival; a job that is tried again keeps its place."""
    put_at: float
    origin: JobOrigin
    state: _State = _State.READY
    attempt: int = 0
    token: str = ""
    due: float = 0.0
    """When the lease expires or the delay is over."""


@attrs.define(eq=False)
class _Dead:
    id: str
    payload: bytes
    attempts: int
    reason: str
    died_at: float
    origin: JobOrigin


class WorkQueueModel:
    """One queue. Every method takes `now` in seconds; it must not go back."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.counts = QueueCounts()
        self._jobs: dict[str, _Job] = {}
        self._leases: dict[str, _Job] = {}
        self._dead: dict[str, _Dead] = {}
        self._seen: dict[str, float] = {}
        self._number = 0
        # One entry for each job that is ready: only `take` ends that.
        self._ready: list[tuple[int, str]] = []
        # Entries of jobs that have moved on are skipped when they come up.
        self._due: list[tuple[float, int, str]] = []

    # --- jobs ---

    def put(
        self, job_id: str, payload: bytes, origin: JobOrigin = NO_ORIGIN, *, now: float
    ) -> PutResult:
        """Add a job; raises `RequestError` for a bad id, `OverloadedError` at `depth_max`."""
        check_job_id(job_id)
        self.advance(now)
        if job_id in self._jobs or job_id in self._seen:
            return PutResult.DUPLICATE
        self._check_depth()
        self._enter(job_id, payload, origin, now)
        self._seen[job_id] = now
        return PutResult.ADDED

    def take(self, token: str, *, now: float) -> LeasedJob | None:
        """Lease the oldest ready job under `token`, which must be new; None if there is none."""
        assert token not in self._leases, f"token {token} names a lease already"
        self.advance(now)
        if not self._ready:
            return None
        job = self._jobs[heapq.heappop(self._ready)[1]]
        job.state, job.token = _State.LEASED, token
        job.attempt += 1
        self._leases[token] = job
        self._wait(job, now + self.limits.visibility_timeout_s)
        return LeasedJob(job.id, job.payload, job.attempt, token, now - job.put_at, job.origin)

    def extend(self, token: str, *, now: float) -> Settlement:
        """The lease lasts another `visibility_timeout_s` from now."""
        job = self._leased(token, now)
        if job is None:
            return Settlement.STALE
        self._wait(job, now + self.limits.visibility_timeout_s)
        return Settlement.APPLIED

    def ack(self, token: str, *, now: float) -> Settlement:
        job = self._leased(token, now)
        if job is None:
            return Settlement.STALE
        del self._leases[token], self._jobs[job.id]
        self.counts.acked += 1
        return Settlement.APPLIED

    def nak(self, token: str, delay_s: float = 0.0, reason: str = "", *, now: float) -> Settlement:
        """The job failed: another attempt after `delay_s`, or none if they are used up."""
        check_delay(delay_s)
        job = self._leased(token, now)
        if job is None:
            return Settlement.STALE
        return self._give_back(job, now + delay_s, reason or "refused", now)

    def advance(self, now: float) -> None:
        """Let time pass: leases expire, delays end, ids are forgotten."""
        while self._due and self._due[0][0] <= now:
            due, number, job_id = heapq.heappop(self._due)
            job = self._jobs.get(job_id)
            if job is None or job.number != number or job.due != due:
                continue
            if job.state is _State.LEASED:
                self.counts.expired += 1
                self._give_back(job, due, EXPIRED, now)
            elif job.state is _State.DELAYED:
                self._make_ready(job)
        while self._seen:
            job_id, put_at = next(iter(self._seen.items()))
            if put_at + self.limits.duplicate_window_s > now and len(self._seen) <= _SEEN_MAX:
                break
            del self._seen[job_id]

    def next_due(self) -> float | None:
        """When `advance` may have something to do that makes a job ready; None for never."""
        return self._due[0][0] if self._due else None

    # --- dead letters ---

    def dead_letters(self, count_max: int, *, now: float) -> list[DeadLetter]:
        self.advance(now)
        return [self._letter(dead, now) for dead in list(self._dead.values())[:count_max]]

    def dead_letter(self, job_id: str, *, now: float) -> DeadLetter | None:
        self.advance(now)
        dead = self._dead.get(job_id)
        return None if dead is None else self._letter(dead, now)

    def requeue(self, job_id: str, *, now: float) -> bool:
        """A dead letter becomes a job again, with all its attempts; whether there was one.

        Raises `OverloadedError` at `depth_max`. If the id was put anew meanwhile, that job stands
        for both.
        """
        self.advance(now)
        dead = self._dead.get(job_id)
        if dead is None:
            return False
        if job_id not in self._jobs:
            self._check_depth()
            self._enter(job_id, dead.payload, dead.origin, now)
        del self._dead[job_id]
        return True

    def purge_dead(self, job_id: str | None = None, *, now: float) -> int:
        """Forget one dead letter, or all; how many there were."""
        self.advance(now)
        if job_id is not None:
            return int(self._dead.pop(job_id, None) is not None)
        count = len(self._dead)
        self._dead.clear()
        return count

    def statistics(self, *, now: float) -> QueueStatistics:
        self.advance(now)
        oldest = min((job.put_at for job in self._jobs.values()), default=now)
        return QueueStatistics(len(self._jobs), len(self._leases), len(self._dead), now - oldest)

    # --- steps ---

    def _enter(self, job_id: str, payload: bytes, origin: JobOrigin, now: float) -> None:
        self._number += 1
        job = self._jobs[job_id] = _Job(job_id, payload, self._number, now, origin)
        self.counts.entered += 1
        self._make_ready(job)

    def _make_ready(self, job: _Job) -> None:
        job.state = _State.READY
        heapq.heappush(self._ready, (job.number, job.id))

    def _wait(self, job: _Job, due: float) -> None:
        job.due = due
        heapq.heappush(self._due, (due, job.number, job.id))

    def _leased(self, token: str, now: float) -> _Job | None:
        self.advance(now)
        return self._leases.get(token)

    def _give_back(self, job: _Job, ready_at: float, reason: str, now: float) -> Settlement:
        del self._leases[job.token]
        job.token = ""
        if job.attempt >= self.limits.attempts_max:
            del self._jobs[job.id]
            self.counts.died += 1
            self._dead.pop(job.id, None)
            why = reason[:REASON_CHARS_MAX]
            self._dead[job.id] = _Dead(job.id, job.payload, job.attempt, why, now, job.origin)
            while len(self._dead) > self.limits.dead_max:
                del self._dead[next(iter(self._dead))]
            return Settlement.DEAD
        if ready_at > now:
            job.state = _State.DELAYED
            self._wait(job, ready_at)
        else:
            self._make_ready(job)
        return Settlement.APPLIED

    def _check_depth(self) -> None:
        if len(self._jobs) >= self.limits.depth_max:
            raise OverloadedError(
                f"{len(self._jobs)} jobs are in the queue",
                bound="depth_max",
                value=self.limits.depth_max,
            )

    @staticmethod
    def _letter(dead: _Dead, now: float) -> DeadLetter:
        return DeadLetter(dead.id, dead.payload, dead.attempts, dead.reason, now - dead.died_at)
