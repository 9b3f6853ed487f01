"""What a consumer decides: its lease's times, the delay of another attempt, verdicts and outcomes."""

from __future__ import annotations

import pytest

from trinamo.runtime.protocol.queue.consumer import (
    Ack,
    Backoff,
    HeldLease,
    JobOutcome,
    Nak,
    WorkEnd,
    outcome_of,
    verdict_on,
)
from trinamo.runtime.protocol.queue.jobs import DELAY_S_MAX, REASON_CHARS_MAX, Settlement


def test_a_lease_is_extended_at_a_third_and_counted_from_when_that_was_asked() -> None:
    lease = HeldLease.taken(9.0, asked_at=100.0, now=100.5)
    assert (lease.extend_at, lease.ends_at) == (103.0, 109.5)
    lease.extended(asked_at=103.0)
    assert (lease.extend_at, lease.ends_at) == (106.0, 112.0)
    assert not lease.is_over(111.9)
    assert lease.is_over(112.0)
    assert lease.left_s(113.0) == 0.0


def test_an_extension_that_failed_is_tried_soon_and_does_not_move_the_end() -> None:
    lease = HeldLease.taken(12.0, asked_at=0.0, now=0.0)
    lease.not_extended(4.5)
    assert (lease.extend_at, lease.ends_at) == (5.5, 12.0)
    lease.not_extended(11.9)
    assert lease.extend_at == 12.0


@pytest.mark.parametrize(
    ("attempt", "mean_s"), [(1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (999, 5.0)]
)
def test_delays_double_up_to_their_bound_with_half_as_much_at_random(
    attempt: int, mean_s: float
) -> None:
    backoff = Backoff(min_s=1.0, max_s=5.0)
    assert backoff.delay_s(attempt, 0.5) == mean_s
    assert backoff.delay_s(attempt, 0.0) == mean_s / 2
    assert backoff.delay_s(attempt, 0.999) < 1.5 * mean_s


def test_no_delay_is_longer_than_a_queue_takes() -> None:
    assert Backoff(min_s=DELAY_S_MAX, max_s=DELAY_S_MAX).delay_s(9, 0.99) == DELAY_S_MAX


def verdict(ending: WorkEnd, reason: str = "") -> Ack | Nak | None:
    return verdict_on(ending, reason=reason, attempt=2, backoff=Backoff(), chance=0.5)


def test_work_that_ended_is_acked_put_back_or_left_alone() -> None:
    assert verdict(WorkEnd.FINISHED) == Ack()
    assert verdict(WorkEnd.RAISED, "no") == Nak(2.0, "no")
    assert verdict(WorkEnd.UNREADABLE, "no") == Nak(2.0, "no")
    returned = verdict(WorkEnd.STOPPED)
    assert isinstance(returned, Nak)
    assert returned.delay_s == 0.0
    assert verdict(WorkEnd.LEASE_LOST) is None


def test_a_reason_is_cut_at_the_queue_s_bound() -> None:
    cut = verdict(WorkEnd.RAISED, "x" * (REASON_CHARS_MAX + 1))
    assert isinstance(cut, Nak)
    assert len(cut.reason) == REASON_CHARS_MAX


@pytest.mark.parametrize(
    ("ending", "settlement", "outcome"),
    [
        (WorkEnd.FINISHED, Settlement.APPLIED, JobOutcome.DONE),
        (WorkEnd.FINISHED, Settlement.STALE, JobOutcome.LOST),
        (WorkEnd.FINISHED, None, JobOutcome.UNSETTLED),
        (WorkEnd.RAISED, Settlement.APPLIED, JobOutcome.FAILED),
        (WorkEnd.RAISED, Settlement.DEAD, JobOutcome.DEAD),
        (WorkEnd.RAISED, Settlement.STALE, JobOutcome.LOST),
        (WorkEnd.UNREADABLE, Settlement.APPLIED, JobOutcome.UNDECODABLE),
        (WorkEnd.UNREADABLE, Settlement.DEAD, JobOutcome.DEAD),
        (WorkEnd.STOPPED, Settlement.APPLIED, JobOutcome.RETURNED),
        (WorkEnd.STOPPED, Settlement.DEAD, JobOutcome.DEAD),
        (WorkEnd.STOPPED, None, JobOutcome.UNSETTLED),
        (WorkEnd.LEASE_LOST, None, JobOutcome.LOST),
    ],
)
def test_an_outcome_is_named_by_the_ending_and_the_broker_s_answer(
    ending: WorkEnd, settlement: Settlement | None, outcome: JobOutcome
) -> None:
    assert outcome_of(ending, settlement) is outcome
