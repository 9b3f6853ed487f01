"""The work queue: each job done by one worker, at least tried, at most `attempts_max` times.

What a job goes through is in `protocol/queue/work_queue.py`, the model that every implementation is
held to; the values that travel are in `jobs.py` beside it. `EventPlane.work_queue` opens one.
"""

from __future__ import annotations

from typing import Protocol

from ..protocol.queue.jobs import (
    NO_ORIGIN,
    DeadLetter,
    JobOrigin,
    LeasedJob,
    PutResult,
    QueueLimits,
    QueueStatistics,
    Settlement,
)


class WorkQueue(Protocol):
    """A named queue on the event plane's broker, shared by all processes that open it.

    Jobs come out oldest first, about. A job is leased to one taker at a time; whoever lets the
    visibility timeout pass loses it to another, and is told so (`Settlement.STALE`) when it comes
    back. Make the effect of a job only after an `APPLIED` ack, or make it idempotent under the
    job's id, and it happens once.

    While the broker is away every method tries again for `timeout_s`, which bridges a change of
    leader (8 s), then raises `DeadlineError` if nothing happened and `UnknownOutcomeError` if it
    may have. All of them may be repeated: a put by its id, the others by their token. A cancelled
    call has an unknown outcome likewise.
    """

    @property
    def name(self) -> str:
        """What it was opened as."""
        ...

    @property
    def limits(self) -> QueueLimits:
        """The bounds in force."""
        ...

    async def put(
        self,
        job_id: str,
        payload: bytes,
        *,
        origin: JobOrigin = NO_ORIGIN,
        timeout_s: float = 10.0,
    ) -> PutResult:
        """Add a job under an id of 1 to 128 letters, digits, `_` and `-`.

        Whoever takes it is told its `origin`.
        Raises `OverloadedError` at `depth_max`, `RequestError` for a bad id or too large a payload.
        """
        ...

    async def take(self, *, wait_s: float) -> LeasedJob | None:
        """Lease the oldest ready job, waiting up to `wait_s` for one; None if there was none.

        Cancelled, it has taken nothing, or what it took is given back or expires. While the
        broker is away it just waits.
        """
        ...

    async def extend(self, job: LeasedJob, *, timeout_s: float = 10.0) -> Settlement:
        """Begin the visibility timeout anew; call it at a third of it while working."""
        ...

    async def ack(self, job: LeasedJob, *, timeout_s: float = 10.0) -> Settlement:
        """The job is done and leaves the queue."""
        ...

    async def nak(
        self,
        job: LeasedJob,
        *,
        delay_s: float = 0.0,
        reason: str = "",
        timeout_s: float = 10.0,
    ) -> Settlement:
        """The job failed: another attempt after `delay_s` (at most an hour), or `DEAD`.

        `reason` is what a dead letter says of its last attempt.
        """
        ...

    async def statistics(self) -> QueueStatistics:
        """Depth and age now; `UnavailableError` if the broker has no such queue any more."""
        ...

    async def dead_letters(self, *, count_max: int = 100) -> list[DeadLetter]:
        """Jobs whose attempts are used up, oldest first."""
        ...

    async def dead_letter(self, job_id: str) -> DeadLetter | None:
        """One dead letter, to inspect."""
        ...

    async def requeue(self, job_id: str) -> bool:
        """Make a dead letter a job again, with all its attempts; whether there was one."""
        ...

    async def purge_dead(self, job_id: str | None = None) -> int:
        """Forget one dead letter, or all; how many there were."""
        ...
