"""Searches and files say the truth: complete is complete, exact is exact, smaller still fails."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import trio
from hypothesis import HealthCheck, given, settings, strategies as st

from trinamo.sim import Choices, ReplayChoices, Violation, World
from trinamo.sim.explore import (
    Failure,
    Scenario,
    explore_bounded,
    load_failure,
    replay,
    run,
    save_failure,
    shrink,
)

STALE_ACK = Scenario("trinamo.sim.programs.leased_queue", parameters={"fenced": False})


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(2, 3), max_size=5), bound=st.integers(0, 3))
def test_a_bounded_search_sees_exactly_the_runs_within_its_bound(
    sizes: list[int], bound: int
) -> None:
    """Compared with all combinations of answers that differ from the default answers `bound` times."""
    seen: list[tuple[int, ...]] = []

    def play(choices: Choices) -> None:
        async def main() -> None:
            seen.append(tuple(choices.below(n, "die") for n in sizes))
            await trio.lowlevel.checkpoint()

        World(choices, policy="fifo").run(main)

    assert explore_bounded(play, max_deviations=bound).is_complete
    everything = itertools.product(*(range(n) for n in sizes))
    expected = [values for values in everything if sum(v != 0 for v in values) <= bound]
    assert sorted(seen) == sorted(expected)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values=st.lists(st.integers(0, 3), max_size=30), seed=st.integers(0, 2**32))
def test_a_failing_run_is_filed_replayed_and_shrunk(values: list[int], seed: int) -> None:
    """Any failing run replays exactly from its file, and shrinks to decisions that it all needs."""
    failing = run(STALE_ACK, ReplayChoices(values, seed))
    if failing.finding is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "failure.json"
        save_failure(Failure.of(STALE_ACK, failing), path)
        again = replay(load_failure(path))
    assert again.is_exact
    assert again.played.run == failing
    shrunk = shrink(STALE_ACK, ReplayChoices(values, seed))
    assert shrunk.run.finding is not None
    assert shrunk.run.finding.invariant == failing.finding.invariant
    assert shrunk.run.deviation_count <= failing.deviation_count
    for place, value in enumerate(shrunk.run.values):
        if value:
            fewer = [*shrunk.run.values]
            fewer[place] = 0
            assert run(STALE_ACK, ReplayChoices(fewer)).finding is None


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.integers(0, 9), min_size=3, max_size=25), at=st.integers(0, 2))
def test_shrinking_keeps_only_what_the_rule_needs(values: list[int], at: int) -> None:
    """A rule about one decision leaves that one, at the lowest value that breaks it."""

    def play(choices: Choices) -> None:
        async def main() -> None:
            answers = [choices.below(10, f"label {n % 3}") for n in range(25)]
            await trio.lowlevel.checkpoint()
            if answers[at] >= 3:
                raise Violation("big", "too big")

        World(choices, policy="fifo").run(main)

    scenario = _Local(play)
    if run(scenario, ReplayChoices(values)).finding is None:
        return
    shrunk = shrink(scenario, ReplayChoices(values))
    assert [v for v in shrunk.run.values if v] == [3]


class _Local(Scenario):
    """A scenario that is a function of the test."""

    def __init__(self, play: object) -> None:
        super().__init__("local")
        object.__setattr__(self, "_play", play)

    def __call__(self, choices: Choices) -> object:
        return self._play(choices)  # type: ignore[attr-defined]
