"""What a consumer of a work queue decides: when to extend, when to give up, what to settle with.

Sans-IO: seconds and chance come in as numbers, verdicts go out. The driver is
`runtime/queues/consumer.py`; what a lease is, is told in `work_queue.py`.
"""

from __future__ import annotations

import enum
from typing import Final

import attrs

from .jobs import DELAY_S_MAX, REASON_CHARS_MAX, Settlement

_EXTENSIONS_PER_LEASE: Final = 3
_RETRIES_PER_LEASE: Final = 12
RETURNED_REASON: Final = "given back: its consumer stopped"


class JobOutcome(enum.StrEnum):
    """What became of one lease of a job. Every job taken ends in exactly one of them."""

    DONE = "done"
    """The handler returned, and the ack was applied: the job is gone."""
    FAILED = "failed"
    """The handler raised. Another attempt follows after a delay."""
    UNDECODABLE = "undecodable"
    """The payload could not be read, so the handler never saw it. Another attempt follows, because
    a newer consumer may be able to."""
    DEAD = "dead"
    """The handler raised, or the payload could not be read, on the last attempt: a dead letter."""
    LOST = "lost"
    """The lease ended before the work did, and the handler was cancelled; or its ack came too late.
    The job is, or will be, somebody else's."""
    RETURNED = "returned"
    """Given back unfinished, because the consumer was drained or cancelled."""
    UNSETTLED = "unsettled"
    """The broker did not say what became of the last step: the job is settled, or its lease expires
    and it is tried again."""


class WorkEnd(enum.Enum):
    """How the work on a job ended, before the broker was told."""

    FINISHED = enum.auto()
    RAISED = enum.auto()
    UNREADABLE = enum.auto()
    LEASE_LOST = enum.auto()
    STOPPED = enum.auto()


@attrs.frozen
class Ack:
    """Verdict: the job is done."""


@attrs.frozen
class Nak:
    """Verdict: the job goes back, to come again after `delay_s`."""

    delay_s: float
    reason: str


@attrs.frozen(kw_only=True)
class Backoff:
    """How long a job that failed waits for its next attempt: twice as long each time.

    At random half as much more or less, so that what failed together does not come back together.
    """

    min_s: float = attrs.field(
        default=1.0, validator=[attrs.validators.ge(0), attrs.validators.le(DELAY_S_MAX)]
    )
    max_s: float = attrs.field(
        default=60.0, validator=[attrs.validators.ge(0), attrs.validators.le(DELAY_S_MAX)]
    )

    def delay_s(self, attempt: int, chance: float) -> float:
        """The delay after the `attempt`-th failure, from 1; `chance` is uniform in [0, 1)."""
        # The exponent is bounded because attempts may be up to 1000.
        mean_s = min(self.max_s, self.min_s * 2.0 ** min(attempt - 1, 32))
        return min(DELAY_S_MAX, mean_s * (0.5 + chance))


@attrs.define
class HeldLease:
    """What a consumer knows of a lease it holds; times on the clock that `now` comes from.

    Once extended, its end is the earliest the broker may have in mind: it is moved only by an
    extension that was applied, and then counted from when that was asked. The token is
    what protects the job's effect, not this: it only saves work that would be for nothing.
    """

    visibility_timeout_s: float
    ends_at: float
    extend_at: float

    @classmethod
    def taken(cls, visibility_timeout_s: float, *, asked_at: float, now: float) -> HeldLease:
        """A lease that this side hears of now, and that may have begun since it was asked for.

        It is extended a third after that, at once if that is over: whoever was stopped while the
        answer was on its way learns that the job is somebody else's.
        """
        return cls(
            visibility_timeout_s,
            now + visibility_timeout_s,
            asked_at + visibility_timeout_s / _EXTENSIONS_PER_LEASE,
        )

    def extended(self, *, asked_at: float) -> None:
        """An extension asked for at `asked_at` was applied: the next is due a third later."""
        self.ends_at = asked_at + self.visibility_timeout_s
        self.extend_at = asked_at + self.visibility_timeout_s / _EXTENSIONS_PER_LEASE

    def not_extended(self, now: float) -> None:
        """The broker refused for a reason that may pass: try again soon, until the end."""
        self.extend_at = min(self.ends_at, now + self.visibility_timeout_s / _RETRIES_PER_LEASE)

    def left_s(self, now: float) -> float:
        """How long it lasts without another extension; never negative."""
        return max(0.0, self.ends_at - now)

    def is_over(self, now: float) -> bool:
        """Whether it has ended, as far as this side knows."""
        return now >= self.ends_at


def verdict_on(
    ending: WorkEnd, *, reason: str, attempt: int, backoff: Backoff, chance: float
) -> Ack | Nak | None:
    """What to tell the broker of a job whose work ended; None if the job is not ours to settle."""
    match ending:
        case WorkEnd.FINISHED:
            return Ack()
        case WorkEnd.RAISED | WorkEnd.UNREADABLE:
            return Nak(backoff.delay_s(attempt, chance), reason[:REASON_CHARS_MAX])
        case WorkEnd.STOPPED:
            return Nak(0.0, RETURNED_REASON)
        case WorkEnd.LEASE_LOST:
            return None


def outcome_of(ending: WorkEnd, settlement: Settlement | None) -> JobOutcome:
    """What became of a job; `settlement` is the broker's answer, None if it gave none."""
    if ending is WorkEnd.LEASE_LOST or settlement is Settlement.STALE:
        return JobOutcome.LOST
    if settlement is None:
        return JobOutcome.UNSETTLED
    if settlement is Settlement.DEAD:
        return JobOutcome.DEAD
    match ending:
        case WorkEnd.FINISHED:
            return JobOutcome.DONE
        case WorkEnd.RAISED:
            return JobOutcome.FAILED
        case WorkEnd.UNREADABLE:
            return JobOutcome.UNDECODABLE
        case WorkEnd.STOPPED:
            return JobOutcome.RETURNED


@attrs.define
class ConsumerCounts:
    """What one consumer has done. `taken == working + sum of outcomes` at every moment."""

    taken: int = 0
    working: int = 0
    """Jobs in hand now."""
    extensions: int = 0
    broker_errors: int = 0
    """Takes and extensions that the broker refused."""
    outcomes: dict[JobOutcome, int] = attrs.field(factory=lambda: dict.fromkeys(JobOutcome, 0))

    def take(self) -> None:
        self.taken += 1
        self.working += 1

    def end(self, outcome: JobOutcome) -> None:
        self.working -= 1
        self.outcomes[outcome] += 1
