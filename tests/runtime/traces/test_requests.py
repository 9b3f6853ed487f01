"""What is told of the requests under way, and of those that failed last."""

from __future__ import annotations

from tests.runtime.traces.test_ring import HandClock
from trinamo.runtime.traces.ring import SET_ASIDE_MAX, SHOWN_MAX, Traces, view_requests


def begin(traces: Traces, number: int, outcome: str = "") -> None:
    trace = traces.begin(f"{number:032x}")
    leg = trace.begin("http", endpoint="chat")
    trace.begin("attempt", instance="00c0ffee00c0ffee")
    if outcome:
        leg.finish(outcome, model="m")


def test_a_request_under_way_tells_its_worker_and_its_leg() -> None:
    clock = HandClock()
    traces = Traces(clock, 8)
    begin(traces, 1)
    clock.at += 2
    (told,) = view_requests(traces).under_way

    assert (told.id, told.instance, told.leg) == (f"{1:032x}", "00c0ffee00c0ffee", "attempt")
    assert (told.start, told.end, told.attempts) == (998.0, None, 1)


def test_answers_are_not_told_and_failures_are_the_newest_first() -> None:
    traces = Traces(HandClock(), 8)
    for number, outcome in enumerate(("success", "overloaded", "success", "engine")):
        begin(traces, number, outcome)
    view = view_requests(traces)

    assert [each.outcome for each in view.failed] == ["engine", "overloaded"]
    assert view.under_way == []


def test_a_failure_outlasts_the_answers_after_it() -> None:
    """Of thousands a second, the ring keeps a moment."""
    traces = Traces(HandClock(), 4)
    begin(traces, 1, "overloaded")
    begin(traces, 2)
    for number in range(100):
        begin(traces, 10 + number, "success")
    view = view_requests(traces)

    assert [each.outcome for each in view.failed] == ["overloaded"]
    assert [each.id for each in view.under_way] == [f"{2:032x}"]
    assert [each.request_id for each in traces.find(f"{1:032x}").traces] == [f"{1:032x}"]


def test_both_lists_and_what_is_set_aside_are_bounded() -> None:
    traces = Traces(HandClock(), SHOWN_MAX)
    for number in range(SHOWN_MAX + 2 * SET_ASIDE_MAX):
        begin(traces, number, "" if number % 2 else "overloaded")
    view = view_requests(traces)

    assert len(view.failed) == len(view.under_way) == SHOWN_MAX
    assert view.under_way_left_out == (SHOWN_MAX + min(SET_ASIDE_MAX, SHOWN_MAX)) // 2 - SHOWN_MAX
