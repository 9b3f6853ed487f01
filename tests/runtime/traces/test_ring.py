"""The ring of traces: what is kept, what is found by which id, and what is told of it."""

from __future__ import annotations

import pytest
import trio

from trinamo.runtime.context import Context
from trinamo.runtime.env import Clock
from trinamo.runtime.errors import DisconnectedError
from trinamo.runtime.traces.ring import FOUND_MAX, RECENT_MAX, Traces, root_of
from trinamo.runtime.traces.trace import LEGS_MAX, NO_TRACE

INNER = "mine-0123456789abcdef"


class HandClock(Clock):
    """Both clocks moved by hand."""

    def __init__(self) -> None:
        self.at, self.wall_at = 5.0, 1000.0

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.wall_at


def ids_of(traces: Traces, asked: str) -> list[str]:
    return [each.request_id for each in traces.find(asked).traces]


@pytest.mark.parametrize(
    "asked",
    ["mine", INNER, f"{INNER}.00c0ffee", f"{INNER}.00c0ffee.12345678", f"{INNER}.127.00c0ffee"],
)
def test_a_request_is_found_by_each_of_its_ids(asked: str) -> None:
    traces = Traces(HandClock(), 10)
    of_one = [INNER, f"{INNER}.00c0ffee", f"{INNER}.0.00c0ffee"]
    for kept in (*of_one, "mine-1", "mine2", "mine.5-0123456789abcdef", "yours"):
        traces.begin(kept)
    assert ids_of(traces, asked) == of_one


def test_a_client_s_id_may_end_like_that_of_an_attempt() -> None:
    traces = Traces(HandClock(), 10)
    for name in ("batch.20261122", "4bf92f3577b34da6.1"):
        inner = f"{name}-0123456789abcdef"
        for kept in (inner, f"{inner}.00c0ffee", "batch-0123456789abcdef"):
            traces.begin(kept)
        for asked in (name, inner, f"{inner}.00c0ffee"):
            assert ids_of(traces, asked) == [inner, f"{inner}.00c0ffee"]


@pytest.mark.parametrize("kind", ["chatcmpl-", "cmpl-", "resp_", "msg_"])
def test_a_request_is_found_by_the_id_of_its_answer(kind: str) -> None:
    traces = Traces(HandClock(), 10)
    for kept in (INNER, f"{INNER}.00c0ffee", f"{kind}theirs-0123456789abcdef", "yours"):
        traces.begin(kept)
    assert ids_of(traces, kind + INNER) == [INNER, f"{INNER}.00c0ffee"]
    assert ids_of(traces, f"{kind}theirs") == [f"{kind}theirs-0123456789abcdef"]


def test_requests_that_a_client_called_the_same_are_told_apart_by_the_id_inside() -> None:
    traces = Traces(HandClock(), 10)
    traces.begin(INNER)
    traces.begin("mine-ffffffffffffffff")
    assert ids_of(traces, "mine") == [INNER, "mine-ffffffffffffffff"]
    assert ids_of(traces, INNER) == [INNER]


def test_the_newest_requests_are_kept_and_the_newest_of_them_told() -> None:
    traces = Traces(HandClock(), 100)
    for number in range(150):
        traces.begin(f"mine-{number:016x}")
    assert ids_of(traces, f"mine-{49:016x}") == []
    assert ids_of(traces, "mine") == [f"mine-{150 - FOUND_MAX + n:016x}" for n in range(FOUND_MAX)]
    recent = traces.recent().request_ids
    assert len(recent) == RECENT_MAX
    assert recent[0] == f"mine-{149:016x}"


def test_times_are_told_by_the_wall_clock_as_it_is_when_asked() -> None:
    """A wall clock that is set back in between moves all times, and no duration."""
    clock = HandClock()
    traces = Traces(clock, 10, instance="7")
    leg = traces.begin("r").begin("http", endpoint="chat")
    clock.at += 1.5
    leg.mark("body")
    clock.at += 1.0
    leg.finish("overloaded", model="m")
    leg.finish()
    clock.at += 10
    clock.wall_at -= 100
    view = traces.find("r")
    assert view.process == {"instance": "7"}
    (told,) = view.traces[0].legs
    assert (told.start, told.end, told.marks) == (887.5, 890.0, [("body", 889.0)])
    assert told.facts == {"endpoint": "chat", "outcome": "overloaded", "model": "m"}


def test_legs_over_the_bound_are_counted() -> None:
    traces = Traces(HandClock(), 1)
    trace = traces.begin("r")
    for _ in range(LEGS_MAX + 3):
        trace.begin("attempt").finish()
    told = traces.find("r").traces[0]
    assert (len(told.legs), told.legs_left_out) == (LEGS_MAX, 3)


def test_a_process_that_keeps_none_writes_nothing() -> None:
    traces = Traces(HandClock(), 0)
    trace = traces.begin("r")
    with trace.begin("http", endpoint="chat") as leg:
        leg.mark("body")
        leg.tell(model="m")
    assert trace is NO_TRACE
    assert (leg.marks, leg.facts) == ([], {})
    assert traces.find("r").requests_max == 0


def test_whoever_works_for_a_request_finds_its_trace_at_the_context() -> None:
    traces = Traces(HandClock(), 10)
    with Context("r") as context:
        assert context.trace is NO_TRACE
        context.trace = traces.begin("r")
        with Context("part", parent=context) as part:
            part.trace.begin("transfer").finish()
    assert [leg.name for leg in traces.find("r").traces[0].legs] == ["transfer"]


async def test_a_leg_ends_with_the_code_of_what_ended_it() -> None:
    trace = Traces(HandClock(), 10).begin("r")
    with pytest.raises(DisconnectedError), trace.begin("attempt"):
        raise DisconnectedError("gone")
    with pytest.raises(ZeroDivisionError), trace.begin("attempt"):
        raise ZeroDivisionError
    with trio.CancelScope() as scope, trace.begin("attempt"):
        scope.cancel()
        await trio.sleep_forever()
    outcomes = [leg.facts["outcome"] for leg in trace.legs]
    assert outcomes == ["disconnected", "internal", "cancelled"]


def test_the_root_of_a_generated_id_is_itself() -> None:
    assert root_of("a" * 32) == "a" * 32
    assert root_of(f"{'a' * 32}.0011aabb") == "a" * 32
