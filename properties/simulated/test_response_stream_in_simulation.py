"""The response stream keeps its promises whatever the network, the schedule and the faults do."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings, strategies as st

from tests.sim.programs.response_stream import Fault, Plan, run
from trinamo.runtime.errors import ConnectError
from trinamo.sim import Choices, SeedChoices
from trinamo.sim.mutants import planted
from trinamo.sim.strategies import choices
from trinamo.transports.tcp import TcpClient

TOO_MUCH = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
PROCESS_FAULTS = ("kill worker", "kill caller", "pause worker", "pause caller")
LINK_FAULTS = ("reset", "cut", "cut worker to caller", "cut caller to worker")


def faults() -> st.SearchStrategy[Fault]:
    """One fault, at a time in the first 60 ms, or just after a note of either end."""
    times = st.integers(0, 60).map(lambda ms: ms / 1000)
    timed = st.builds(
        Fault,
        kind=st.sampled_from(LINK_FAULTS + PROCESS_FAULTS),
        at_s=times,
        lasts_s=st.sampled_from((0.01, 0.5, 4.0)),
    )
    noted = st.builds(
        Fault,
        kind=st.sampled_from(LINK_FAULTS + PROCESS_FAULTS),
        on=st.sampled_from(("stream.sent", "stream.got", "stream.end", "handler.end")),
        nth=st.integers(1, 12),
        lasts_s=st.sampled_from((0.01, 0.5, 4.0)),
    )
    for_good = st.builds(
        Fault,
        kind=st.sampled_from(("cut", "cut worker to caller", "cut caller to worker")),
        at_s=times,
        lasts_s=st.just(math.inf),
    )
    return timed | noted | for_good


def plans() -> st.SearchStrategy[Plan]:
    """Small clusters: the first bug needs few items."""
    after = st.just(-1) | st.integers(1, 6)
    return st.builds(
        Plan,
        streams=st.integers(1, 3),
        items=st.integers(1, 8),
        item_bytes=st.sampled_from((4, 40, 3000)),
        gap_s=st.sampled_from((0.0, 0.002, 0.02)),
        stop_after=after,
        kill_after=after,
        leave_after=after,
        tear_one_in=st.sampled_from((0, 2)),
        short_one_in=st.sampled_from((0, 2)),
        window_bytes=st.sampled_from((64, 65536)),
        policy=st.sampled_from(("fifo", "choice", "batch", "step", "pct")),
        carrier=st.sampled_from(("multiplexed", "dedicated")),
        faults=st.lists(faults(), max_size=2).map(tuple),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=TOO_MUCH)
@given(plan=plans(), choices=choices(decisions_max=512))
def test_the_invariants_hold_under_drawn_choices_and_faults(plan: Plan, choices: Choices) -> None:
    """I1: items are a gapless prefix. I2: one terminal. I5, I15: all ends, nothing is left.

    Progress: without faults every stream is whole, and after them the next one is.

    Replay a failure with `run(plan, choices)`; both are in the falsifying example.
    """
    outcome = run(plan, choices)
    note(f"terminals {outcome.terminals}, handlers {outcome.handlers}")
    assert outcome.violations() == []


def cut_short() -> st.SearchStrategy[Plan]:
    """Several streams on a link that is lost while they are under way."""
    times = st.integers(10, 60).map(lambda ms: ms / 1000)
    lost = st.builds(Fault, kind=st.just("cut"), at_s=times, lasts_s=st.just(math.inf))
    return st.builds(
        Plan,
        streams=st.just(3),
        items=st.just(8),
        gap_s=st.just(0.02),
        policy=st.sampled_from(("batch", "pct", "choice")),
        carrier=st.just("multiplexed"),
        faults=st.tuples(lost),
    )


@pytest.mark.parametrize(
    ("bug", "drawn"),
    [
        ("rest_of_a_send_lost", plans()),
        ("link_loses_one_stream", cut_short()),
        # A scenario of the catalogue shows it as well.
        pytest.param("kill_lost_at_the_close", plans(), marks=pytest.mark.check),
    ],
)
def test_a_planted_mistake_is_found(bug: str, drawn: st.SearchStrategy[Plan]) -> None:
    """Such as what shows only if a socket takes a part of what it is given."""

    @settings(max_examples=2000, deadline=None, phases=[Phase.generate], database=None)
    @given(plan=drawn, choices=choices(decisions_max=512))
    def holds(plan: Plan, choices: Choices) -> None:
        assert run(plan, choices).violations() == []

    with planted(bug), pytest.raises((AssertionError, ExceptionGroup)):
        holds()


@pytest.mark.parametrize("faults", [(), (Fault("pause worker", at_s=0.01, lasts_s=0.5),)])
def test_workers_that_never_call_home_are_found_out(
    faults: tuple[Fault, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call_home(*_: object) -> None:
        raise ConnectError("nobody is at home")

    monkeypatch.setattr(TcpClient, "call_home", call_home)
    broken = run(Plan(faults=faults), SeedChoices(1)).violations()
    assert any(text.startswith("I15: the last stream") for text in broken)
    assert faults or any("without faults" in text for text in broken)
