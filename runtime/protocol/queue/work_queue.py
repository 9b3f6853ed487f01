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
import re
from typing import Final

import attrs

from ...errors import OverloadedError, RequestError

__all__ = [
    "DELAY_S_MAX",
    "DeadLetter",
    "LeasedJob",
    "PutResult",
    "QueueCounts",
    "QueueLimits",
    "QueueStatistics",
    "Settlement",
    "WorkQueueModel",
    "check_delay",
    "check_job_id",
    "check_queue_name",
]

DELAY_S_MAX: Final = 3600.0
"""The longest delay of a `nak`."""
REASON_CHARS_MAX: Final = 512
_SEEN_MAX: Final = 1_000_000
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_JOB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
EXPIRED: Final = "its last lease expired"


def check_queue_name(name: str) -> None:
    """Raise `RequestError` unless `name` is 1 to 64 letters, digits, `_` and `-`."""
    if not _NAME.fullmatch(name):
        raise RequestError(f"{name[:80]!r} is not the name of a queue", param="name")


def check_job_id(job_id: str) -> None:
    """Raise `RequestError` unless `job_id` is 1 to 128 letters, digits, `_` and `-`."""
    if not _JOB_ID.fullmatch(job_id):
        raise RequestError(f"{job_id[:160]!r} is not the id of a job", param="job_id")


def check_delay(delay_s: float) -> None:
    """Raise `RequestError` unless `delay_s` is between 0 and an hour."""
    if not 0 <= delay_s <= DELAY_S_MAX:
        raise RequestError(f"a delay of {delay_s:g} s; 0 to {DELAY_S_MAX:g} fit", param="delay_s")


@attrs.frozen(kw_only=True)
class QueueLimits:
    """The bounds of one queue. All processes that open it should name the same ones."""

    visibility_timeout_s: float = attrs.field(
        default=30.0, validator=[attrs.validators.gt(0), attrs.validators.le(DELAY_S_MAX)]
    )
    """How long a job is invisible after it was taken or extended."""
    attempts_max: int = attrs.field(
        default=5, validator=[attrs.validators.ge(1), attrs.validators.le(1000)]
    )
    """How often a job may be taken before it is a dead letter."""
    duplicate_window_s: float = attrs.field(
        default=120.0, validator=[attrs.validators.gt(0), attrs.validators.le(86_400)]
    )
    """How long after its put an id is remembered, also if the job is finished."""
    depth_max: int = attrs.field(default=100_000, validator=attrs.validators.ge(1))
    """How many jobs may be ready and leased together; more are refused."""
    dead_max: int = attrs.field(default=10_000, validator=attrs.validators.ge(1))
    """How many dead letters are kept; the oldest are forgotten."""


class PutResult(enum.StrEnum):
    """What became of a put. Neither is an error: the job is in the queue, or has been."""

    ADDED = "added"
    DUPLICATE = "duplicate"
    """The id is in the queue, or was put less than `duplicate_window_s` ago. Nothing changed."""


class Settlement(enum.StrEnum):
    """What became of an `ack`, `nak` or `extend`."""

    APPLIED = "applied"
    DEAD = "dead"
    """A nak that used up the last attempt: the job is a dead letter now."""
    STALE = "stale"
    """The lease had expired or was settled already: nothing changed, and the effect of the work
    must not be made (it is, or will be, somebody else's)."""


@attrs.frozen
class LeasedJob:
    """A job as handed to one taker."""

    id: str
    payload: bytes = attrs.field(repr=False)
    attempt: int
    """1 for the first time; at most `attempts_max`."""
    token: str
    """Names this lease, and no other lease of any job."""
    queued_s: float = 0.0
    """How long ago it was put."""


@attrs.frozen
class DeadLetter:
    """A job whose attempts are used up."""

    id: str
    payload: bytes = attrs.field(repr=False)
    attempts: int
    reason: str
    """The last nak's words, or that the lease expired."""
    dead_s: float
    """How long ago it died."""


@attrs.frozen
class QueueStatistics:
    """A queue at one moment."""

    depth: int
    """Jobs neither acked nor dead."""
    leased: int
    """Those of them that are taken. A broker may also count those that await another attempt."""
    dead: int
    """Dead letters kept."""
    oldest_age_s: float
    """How long ago the oldest job of `depth` was put; 0 if there is none."""

    @property
    def ready(self) -> int:
        """Jobs that nobody has taken."""
        return self.depth - self.leased


@attrs.define
class QueueCounts:
    """All that ever happened. `entered == depth + acked + died` at every moment."""

    entered: int = 0
    """Jobs put or queued again; duplicates are not among them."""
    duplicates: int = 0
    acked: int = 0
    died: int = 0
    expired: int = 0
    """Leases that expired."""
    stale: int = 0
    """Steps that came too late and changed nothing."""
    forgotten: int = 0
    """Dead letters dropped because `dead_max` were kept."""


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

    def put(self, job_id: str, payload: bytes, *, now: float) -> PutResult:
        """Add a job; raises `RequestError` for a bad id, `OverloadedError` at `depth_max`."""
        check_job_id(job_id)
        self.advance(now)
        if job_id in self._jobs or job_id in self._seen:
            self.counts.duplicates += 1
            return PutResult.DUPLICATE
        self._check_depth()
        self._enter(job_id, payload, now)
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
        return LeasedJob(job.id, job.payload, job.attempt, token, now - job.put_at)

    def extend(self, token: str, *, now: float) -> Settlement:
        """The lease lasts another `visibility_timeout_s` from now."""
        job = self._leased(token, now)
        if job is None:
            return Settlement.STALE
        self._wait(job, now + self.limits.visibility_timeout_s)
        return Settlement.APPLIED

    def ack(self, token: str, *, now: float) -> Settlement:
        """The job is done."""
        job = self._leased(token, now)
        if job is None:
            return Settlement.STALE
        del self._leases[token], self._jobs[job.id]
        self.counts.acked += 1
        return Settlement.APPLIED

    def nak(self, token: str, *, now: float, delay_s: float = 0.0, reason: str = "") -> Settlement:
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

    def dead_letters(self, *, now: float, count_max: int) -> list[DeadLetter]:
        """The oldest dead letters first."""
        self.advance(now)
        return [self._letter(dead, now) for dead in list(self._dead.values())[:count_max]]

    def dead_letter(self, job_id: str, *, now: float) -> DeadLetter | None:
        """The dead letter with this id."""
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
            self._enter(job_id, dead.payload, now)
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
        """The queue now."""
        self.advance(now)
        oldest = min((job.put_at for job in self._jobs.values()), default=now)
        return QueueStatistics(len(self._jobs), len(self._leases), len(self._dead), now - oldest)

    # --- steps ---

    def _enter(self, job_id: str, payload: bytes, now: float) -> None:
        self._number += 1
        job = self._jobs[job_id] = _Job(job_id, payload, self._number, now)
        self._seen.pop(job_id, None)
        self._seen[job_id] = now
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
        job = self._leases.get(token)
        if job is None:
            self.counts.stale += 1
        return job

    def _give_back(self, job: _Job, ready_at: float, reason: str, now: float) -> Settlement:
        del self._leases[job.token]
        job.token = ""
        if job.attempt >= self.limits.attempts_max:
            del self._jobs[job.id]
            self._bury(job, reason[:REASON_CHARS_MAX], now)
            return Settlement.DEAD
        if ready_at > now:
            job.state = _State.DELAYED
            self._wait(job, ready_at)
        else:
            self._make_ready(job)
        return Settlement.APPLIED

    def _bury(self, job: _Job, reason: str, now: float) -> None:
        self.counts.died += 1
        self._dead.pop(job.id, None)
        self._dead[job.id] = _Dead(job.id, job.payload, job.attempt, reason, now)
        while len(self._dead) > self.limits.dead_max:
            del self._dead[next(iter(self._dead))]
            self.counts.forgotten += 1

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
