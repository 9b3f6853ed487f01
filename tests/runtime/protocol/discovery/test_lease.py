from __future__ import annotations

import pytest

from trinamo.runtime.protocol.discovery.lease import LeaseTimer


def test_a_lease_counts_from_when_it_was_asked_for() -> None:
    assert LeaseTimer.granted(10, asked_at=100).deadline == 110


@pytest.mark.parametrize(("now", "wait_s"), [(100, 5), (108, 1), (109.99, 0.05), (200, 0.05)])
def test_renewal_is_due_at_half_of_what_remains(now: float, wait_s: float) -> None:
    assert LeaseTimer(10, 110).wait_s(now) == pytest.approx(wait_s)


def test_renewals_without_an_answer_come_sooner_and_sooner_and_all_before_the_deadline() -> None:
    """A fixed half of the time to live misses the deadline just after a reconnect."""
    timer, now, attempts = LeaseTimer(10, 10), 0.0, 0
    while now + timer.wait_s(now) < timer.deadline:
        now += timer.wait_s(now)
        attempts += 1
    assert attempts >= 7


def test_a_renewal_moves_the_deadline_and_never_back() -> None:
    timer = LeaseTimer(10, 110)
    timer.renewed(10, asked_at=105)
    assert timer.deadline == 115
    timer.renewed(3, asked_at=105)
    assert timer.deadline == 115


def test_a_retry_waits_a_second_at_most() -> None:
    timer = LeaseTimer(60, 60)
    assert timer.retry_s(0) == 1
    assert timer.retry_s(59) == 0.5


def test_the_deadline_itself_is_past() -> None:
    timer = LeaseTimer(10, 110)
    assert not timer.is_past(109.9)
    assert timer.is_past(110)
