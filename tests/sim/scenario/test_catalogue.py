"""Every shipped scenario holds on some seeds, replays exactly, and its planted mutants are found."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from trinamo.sim import ReplayChoices, SeedChoices, first_difference
from trinamo.sim.catalogue import scenario_paths
from trinamo.sim.explore import Coverage, run as explore
from trinamo.sim.explore.swarm import Progress
from trinamo.sim.mutants.bugs import BUGS
from trinamo.sim.mutants.planting import Patch, bug
from trinamo.sim.scenario.file import load_scenario
from trinamo.sim.scenario.plans import Mutant
from trinamo.sim.scenario.play import play_of
from trinamo.sim.scenario.run import run_scenario
from trinamo.sim.scenario.scenario import Scenario

PATHS = scenario_paths()
MUTANTS = [(path, mutant) for path in PATHS for mutant in load_scenario(path).mutants]
SEEDS_MAX = 10
"""How many runs a scenario has to show all that it is about."""
DEDICATED = [
    "handler_finishes",
    "handler_raises_later",
    "client_disconnects",
    "consumer_drops",
    "stop",
    "kill",
    "reasons",
    "stop_then_kill",
    "data_crosses_kill",
    "worker_dies",
    "caller_dies",
    "s9_kill_and_sentinel",
    "slow_reader",
    "exchange_cut",
    "exchange_killed",
    "exchange_worker_dies",
]
"""Those played on a connection for each stream as well; `make swarm` plays all of them so."""
ON_BOTH = [path for path in PATHS if path.stem in DEDICATED]
ROWS = {
    "handler finishes",
    "handler raises before its first item",
    "handler raises later",
    "client disconnects",
    "consumer drops the stream",
    "stop()",
    "kill()",
    "Stop then Kill",
    "data crosses Kill on the wire",
    "worker process dies (FIN or RST) without end mark",
    "caller dies (FIN or RST)",
    "half-open link",
    "unknown subject, taken subject, malformed handshake",
    "handshake never comes",
    "oversize or malformed frame",
    "descriptor exhaustion in accept",
}
"""The event table of the stream protocol."""
FAILURES = {f"S{number}" for number in range(1, 13)}


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_shipped_scenario_breaks_no_invariant_and_gets_no_hint(path: Path) -> None:
    play, progress = play_of(path), Progress()
    for seed in range(1, SEEDS_MAX + 1):
        progress.add(explore(play, seed))
        if not progress.coverage.untested:
            break
    assert [str(kind.first.finding) for kind in progress.failures.values()] == []
    assert progress.coverage.untested == []
    assert progress.hints == []


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_shipped_scenario_replays_exactly(path: Path) -> None:
    """The seed gives the trace, and so does the list of choices it led to; no rule is broken."""
    scenario = load_scenario(path)
    first = run_scenario(scenario, SeedChoices(5))
    values = first.world.choices.values
    again = run_scenario(scenario, ReplayChoices(values, seed=5))
    assert first_difference(first.world.trace, again.world.trace) == ""
    assert first.digest == again.digest
    assert first.violations == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "mutant"), MUTANTS, ids=[f"{path.stem}-{mutant.bug}" for path, mutant in MUTANTS]
)
def test_a_planted_bug_is_found(path: Path, mutant: Mutant) -> None:
    """A simulator that finds nothing may be blind: each known mistake, put back, must show."""
    find(load_scenario(path), mutant)


@pytest.mark.slow
@pytest.mark.parametrize("path", ON_BOTH, ids=lambda path: path.stem)
def test_streams_on_connections_of_their_own_break_no_invariant_and_hide_no_bug(
    path: Path,
) -> None:
    scenario = load_scenario(path).on("dedicated")
    outcome = run_scenario(scenario, SeedChoices(1))
    assert [str(violation) for violation in outcome.violations] == []
    for mutant in scenario.mutants:
        find(scenario, mutant)


def test_streams_share_connections_unless_they_are_told_otherwise() -> None:
    """Workers call their callers once, or once for each answer."""
    scenario = load_scenario(next(path for path in PATHS if path.stem == "handler_finishes"))
    calls = []
    for played in (scenario, scenario.on("dedicated")):
        outcome = run_scenario(played, SeedChoices(1))
        ends = [
            (str(row.field("source")), str(row.field("target")))
            for row in outcome.world.trace.of_kind("connect")
        ]
        to = ("frontend", "client")
        calls.append([end for end in ends if end[0].startswith("worker") and end[1].startswith(to)])
    assert len(calls[0]) == len(set(calls[0])) <= 4
    assert len(calls[1]) == 9


def find(scenario: Scenario, mutant: Mutant) -> None:
    """Play with the mistake until it shows."""
    coverage = Coverage()
    for seed in range(1, min(mutant.seeds_max, 40) + 1):
        outcome = run_scenario(scenario, SeedChoices(seed), bug=mutant.bug)
        if any(violation.invariant == mutant.finds for violation in outcome.violations):
            return
        if not outcome.violations:
            coverage.add(outcome.untested)
    if mutant.finds == "expected" and coverage.untested:
        return
    pytest.fail(f"{mutant.bug} was not found")


def _covers(path: Path) -> list[str]:
    found: list[str] = tomllib.loads(path.read_text("utf-8")).get("covers", [])
    return found


def test_every_row_of_the_event_table_has_a_scenario() -> None:
    covered = {each for path in PATHS for each in _covers(path)}
    assert sorted((ROWS | FAILURES) - covered) == []


def test_every_scenario_has_a_mutant_and_every_bug_is_in_use() -> None:
    assert [path.stem for path in PATHS if not load_scenario(path).mutants] == []
    assert sorted(set(BUGS) - {mutant.bug for _, mutant in MUTANTS}) == []


def test_a_planted_bug_is_gone_after_its_run() -> None:
    path = next(path for path in PATHS if path.stem == "stop")
    scenario = load_scenario(path)
    assert run_scenario(scenario, SeedChoices(1), bug="stop_unheard").violations
    assert not run_scenario(scenario, SeedChoices(1)).violations


def test_two_mistakes_must_not_have_one_name() -> None:
    def stop_unheard() -> list[Patch]:
        return []

    with pytest.raises(AssertionError, match="two mistakes are called stop_unheard"):
        bug(stop_unheard)


def test_the_searchers_can_play_a_scenario_file() -> None:
    path = next(path for path in PATHS if path.stem == "stop")
    assert explore(play_of(path), 1).finding is None
    finding = explore(play_of(path, bug="stop_unheard"), 1).finding
    assert finding is not None
    assert finding.invariant == "I3"
