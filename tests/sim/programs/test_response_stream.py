"""The TCP response stream, both ends unmodified, over simulated sockets with faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest

from tests.sim.programs.response_stream import Fault, FaultKind, Outcome, Plan, run
from trinamo.sim import SeedChoices, first_difference
from trinamo.sim.mutants import planted
from trinamo.transports.tcp import TcpStreamServer
from trinamo.transports.tcp.streams.link import LinkLane
from trinamo.transports.tcp.streams.registrations import ResponseRegistration

HALFWAY = 15
"""Which delivered item, of 40 in two streams, sets off a fault."""


_carrier: Literal["multiplexed", "dedicated"] = "multiplexed"


@pytest.fixture(autouse=True, params=["multiplexed", "dedicated"])
def on_each_carrier(request: Any) -> None:
    global _carrier
    _carrier = request.param


def plan_of(**changes: Any) -> Plan:
    return Plan(carrier=_carrier, **changes)


def twice(plan: Plan, seed: int = 1) -> Outcome:
    """Run `plan` two times: the traces are equal, the invariants hold."""
    first, again = run(plan, SeedChoices(seed)), run(plan, SeedChoices(seed))
    assert first_difference(first.world.trace, again.world.trace) == ""
    assert first.digest == again.digest
    assert first.violations() == []
    return first


def on_item(kind: FaultKind, lasts_s: float = 1.0) -> Plan:
    return plan_of(faults=(Fault(kind, on="stream.got", nth=HALFWAY, lasts_s=lasts_s),))


def terminals(outcome: Outcome) -> set[str]:
    return {terminal for told in outcome.terminals.values() for terminal in told}


def test_torn_reads_and_short_writes_change_nothing() -> None:
    outcome = twice(plan_of(tear_one_in=2, short_one_in=2, window_bytes=256, item_bytes=300))
    assert outcome.got == {0: list(range(20)), 1: list(range(20))}
    assert terminals(outcome) == {"complete"}
    labels = {choice.label for choice in outcome.world.choices.record}
    assert {"tear", "short"} <= labels


def test_other_seeds_give_other_traces_of_the_same_answer() -> None:
    outcomes = [run(plan_of(), SeedChoices(seed)) for seed in range(5)]
    assert len({outcome.digest for outcome in outcomes}) == 5
    assert {tuple(outcome.got[0]) for outcome in outcomes} == {tuple(range(20))}


def test_a_reset_in_mid_stream_disconnects_the_caller_and_kills_the_handler() -> None:
    outcome = twice(on_item("reset"))
    assert terminals(outcome) == {"DisconnectedError"}
    # On a link the other stream's item came in the same batch.
    assert sum(map(len, outcome.got.values())) - HALFWAY in (0, 1)
    ends = outcome.world.trace.of_kind("handler.end")
    # The one that is asked for afterwards is whole.
    struck = {row.field("state") for row in ends if row.field("stream") in outcome.terminals}
    assert struck == {"KILLED"}


def test_a_killed_worker_disconnects_its_callers_at_once() -> None:
    outcome = twice(on_item("kill worker"))
    assert terminals(outcome) == {"DisconnectedError"}
    killed_s = outcome.world.trace.of_kind("kill")[0].time_s
    told_s = max(row.time_s for row in outcome.world.trace.of_kind("stream.end"))
    assert told_s - killed_s < 0.005


def test_a_killed_caller_ends_its_handlers_at_once() -> None:
    outcome = twice(on_item("kill caller"))
    assert outcome.handlers == {0: True, 1: True}
    assert outcome.finished == set()
    killed_s = outcome.world.trace.of_kind("kill")[0].time_s
    ended_s = max(row.time_s for row in outcome.world.trace.of_kind("handler.end"))
    assert ended_s - killed_s < 0.005


def test_a_cut_that_heals_delays_the_answer_and_loses_nothing() -> None:
    outcome = twice(on_item("cut", lasts_s=2))
    assert terminals(outcome) == {"complete"}
    assert outcome.got == {0: list(range(20)), 1: list(range(20))}


@pytest.mark.parametrize("kind", ["cut", "cut worker to caller"])
def test_a_cut_for_good_is_noticed_by_both_ends_within_the_stated_bound(kind: FaultKind) -> None:
    outcome = twice(on_item(kind, lasts_s=math.inf))
    assert terminals(outcome) == {"DisconnectedError"}
    cut_s = outcome.world.trace.of_kind("cut")[0].time_s
    ends = [r for k in ("stream.end", "handler.end") for r in outcome.world.trace.of_kind(k)]
    assert len(ends) == 4
    # Keep-alive: idle 5 s, then three probes 2 s apart; and 1 s.
    assert max(row.time_s for row in ends) - cut_s <= 5 + 2 * 3 + 1


@pytest.mark.parametrize("kind", ["pause worker", "pause caller"])
def test_a_pause_delays_the_answer_and_loses_nothing(kind: FaultKind) -> None:
    outcome = twice(on_item(kind))
    assert terminals(outcome) == {"complete"}
    assert outcome.got == {0: list(range(20)), 1: list(range(20))}


def test_a_paused_consumer_stops_the_handler_within_the_bounds_of_the_buffers() -> None:
    plan = plan_of(streams=1, items=200, item_bytes=8192, tear_one_in=0, short_one_in=0)
    pause = Fault("pause caller", on="stream.got", nth=5, lasts_s=5)
    outcome = twice(replace(plan, faults=(pause,)))
    rows = outcome.world.trace.rows
    paused = next(i for i, row in enumerate(rows) if row.kind == "pause")
    resumed = next(i for i, row in enumerate(rows) if row.kind == "resume")
    ahead = sum(row.kind == "stream.sent" for row in rows[paused:resumed])
    # One window of credit, what waits for it, and the connection's window.
    assert ahead * 8192 <= (256 + 256 + 64) * 1024
    assert terminals(outcome) == {"complete"}


def test_stop_ends_the_answer_early_and_completely() -> None:
    outcome = twice(plan_of(stop_after=5))
    assert terminals(outcome) == {"complete"}
    assert all(5 <= len(got) < 20 for got in outcome.got.values())


def test_kill_ends_the_answer_at_once_on_both_sides() -> None:
    outcome = twice(plan_of(kill_after=5))
    assert terminals(outcome) == {"KilledError"}
    assert [len(got) for got in outcome.got.values()] == [5, 5]
    assert outcome.finished == set()


def test_a_consumer_that_leaves_kills_a_handler_that_sleeps() -> None:
    outcome = twice(plan_of(leave_after=5, gap_s=3.0))
    assert terminals(outcome) == {"left"}
    assert outcome.finished == set()


def test_a_worker_that_dies_before_it_calls_is_noticed_by_its_absence() -> None:
    outcome = twice(plan_of(faults=(Fault("kill worker", at_s=0.0002),)))
    assert terminals(outcome) == {"DisconnectedError"}
    assert outcome.world.trace.of_kind("stream.got") == []


def test_a_caller_that_cannot_be_reached_fails_the_call_home() -> None:
    outcome = twice(plan_of(faults=(Fault("cut", lasts_s=20), Fault("kill caller", at_s=1))))
    errors = {row.field("error") for row in outcome.world.trace.of_kind("call.failed")}
    assert errors == {"ConnectError"}


def test_the_check_itself_finds_a_gap_a_second_terminal_and_a_leak() -> None:
    outcome = run(plan_of(streams=1), SeedChoices(1))
    outcome.got[0].remove(3)
    outcome.terminals[0].append("DisconnectedError")
    outcome.handlers[0] = False
    found = [text.partition(":")[0] for text in outcome.violations()]
    assert found == ["I1", "I2", "I5", "I15"]


def test_a_planted_truncation_that_looks_complete_is_found() -> None:
    with planted("eof_is_complete"):
        outcome = run(on_item("reset"), SeedChoices(1))
    assert [violation[:2] for violation in outcome.violations()] == ["I2", "I2"]


def test_a_planted_kill_that_is_never_said_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResponseRegistration, "_kill", lambda *_: None)
    violations = run(plan_of(leave_after=5, gap_s=0.02), SeedChoices(1)).violations()
    assert {violation[:2] for violation in violations} == {"I4"}


def test_a_planted_subject_leak_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TcpStreamServer, "_forget", lambda server, subject: None)
    (violation,) = run(plan_of(), SeedChoices(1)).violations()
    assert violation.startswith("I5: left {'subjects': 2}")


def test_a_planted_repetition_in_the_writer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice_the_fifth(
        put: Callable[[Any, bytes], bool],
    ) -> Callable[[Any, bytes], bool]:
        def put_twice(lane: LinkLane, item: bytes) -> bool:
            if item.startswith((5).to_bytes(4, "big")):
                put(lane, item)
            return put(lane, item)

        return put_twice

    monkeypatch.setattr(LinkLane, "put", twice_the_fifth(LinkLane.put))
    found = {violation[:2] for violation in run(plan_of(), SeedChoices(1)).violations()}
    assert found == {"I1", "I2"}
