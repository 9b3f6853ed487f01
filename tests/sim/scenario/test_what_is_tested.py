"""What a scenario is about must come to pass in some run; and what a run must not touch is refused."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trinamo.cli.sim.sim import sim
from trinamo.sim import Escape, SeedChoices
from trinamo.sim.checks.leases import check
from trinamo.sim.cluster.outcome import Outcome
from trinamo.sim.explore import Coverage, Progress, Scenario, run
from trinamo.sim.scenario.file import parse_scenario
from trinamo.sim.scenario.run import run_scenario

HEAD = 'name = "a"\nabout = "b"\n'


def play(text: str, seed: int = 1) -> Outcome:
    return run_scenario(parse_scenario(HEAD + text), SeedChoices(seed))


LATE = '[[workload]]\n[[fault]]\ndo = "kill"\non = "worker0"\nafter_note = "worker.ready#1"\n'


def test_a_fault_whose_note_came_before_the_load_never_strikes_and_is_told() -> None:
    outcome = play(LATE)
    assert outcome.violations == []
    assert outcome.world.untested == [
        "the fault kill worker0 never struck: it waited for note 1 of 'worker.ready', and 0 came"
    ]


def test_a_fault_whose_time_never_came_is_told() -> None:
    outcome = play('[[workload]]\n[[fault]]\ndo = "kill"\non = "worker0"\nat = 500.0\n')
    assert outcome.world.untested == [
        "the fault kill worker0 never struck: the run was over before"
    ]


def test_a_fault_that_a_run_decided_against_is_not_missed() -> None:
    outcome = play(LATE + "maybe = true\n", seed=next(s for s in range(9) if _is_left_out(s)))
    assert outcome.world.untested == []


def _is_left_out(seed: int) -> bool:
    outcome = play(LATE.replace("worker.ready", "stream.token") + "maybe = true\n", seed)
    return not outcome.world.trace.of_kind("fault")


def test_what_one_run_lacks_another_may_show() -> None:
    coverage = Coverage()
    assert coverage.untested == []
    coverage.add(["note 3 of 'x' was waited for, and 1 came", "there is no note 'y'"])
    coverage.add(["note 3 of 'x' was waited for, and 2 came"])
    assert coverage.untested == ["note 3 of 'x' was waited for, and 1 came"]
    coverage.add([])
    assert coverage.untested == []


def test_a_run_that_failed_says_nothing_about_what_was_tested() -> None:
    progress = Progress()
    failing = Scenario("trinamo.sim.programs.leased_queue", parameters={"fenced": False})
    progress.add(next(r for r in (run(failing, seed) for seed in range(200)) if r.finding))
    assert progress.coverage.untested == []


def test_a_swarm_that_never_tests_what_it_is_about_is_a_finding(tmp_path: Path) -> None:
    late = tmp_path / "late.toml"
    late.write_text(HEAD + LATE, "utf-8")
    result = CliRunner().invoke(sim, ["swarm", str(late), "--seeds", "1..3"])
    assert result.exit_code == 1
    assert "the fault kill worker0 never struck" in result.output
    assert "in none of 3 runs" in result.output
    alone = CliRunner().invoke(sim, ["run", str(late)])
    assert alone.exit_code == 0
    assert "Not tested by this run: the fault kill worker0 never struck" in alone.output


# Looked up when called: the guard replaces the names.
# ruff: noqa: PLW0108
REACHES: dict[str, Callable[[], object]] = {
    "time.time": lambda: time.time(),
    "random.random": lambda: random.random(),
    "os.urandom": lambda: os.urandom(4),
}


@pytest.mark.parametrize("name", REACHES)
def test_code_that_reaches_for_clock_or_dice_ends_a_cluster_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reaching(*_: object, **_more: object) -> None:
        REACHES[name]()

    monkeypatch.setattr("trinamo.sim.cluster.engines.request_name", reaching)
    with pytest.raises(Escape, match="simulated code"):
        play("[[workload]]")


def _judged(*notes: tuple[float, str, Mapping[str, object]]) -> list[str]:
    """What is said of leases of which these notes tell."""
    outcome = play("[[workload]]")
    trace = outcome.world.trace
    trace.is_muted = False
    trace._rows.clear()
    trace._raw.clear()
    for time_s, kind, fields in notes:
        trace.add(time_s, "store.1", kind, fields)
    outcome.__dict__.pop("told", None)
    outcome.world.ended_s = 10.0
    return [text for invariant, text in check(outcome) if invariant == "I6"]


def test_what_happens_to_an_unknown_lease_is_a_violation() -> None:
    grant = (0.0, "store.grant", {"lease": 1, "ttl_s": 5.0})
    gone = (1.0, "store.revoke", {"lease": 1})
    end = (5.0, "store.expire", {"lease": 1})
    assert _judged(grant, end) == []
    assert _judged(grant, gone, end) == ["lease 1 ended at 5.000 s, and was not alive"]
    assert _judged(end) == ["lease 1 ended at 5.000 s, and was not alive"]
    assert _judged(grant, end, end)[0] == "lease 1 ended at 5.000 s, and was not alive"
    assert _judged((1.0, "store.renew", {"lease": 7}))[0].startswith("lease 7 was renewed")
    assert _judged((1.0, "store.restart", {"leases": [7]})) == [
        "lease 7 is there after a restart, and was not before"
    ]


def test_a_lease_that_lives_for_too_long_is_a_violation_though_it_never_ends() -> None:
    grant = (0.0, "store.grant", {"lease": 1, "ttl_s": 5.0})
    assert _judged(grant) == ["lease 1 was due at 5.000 s, and lives at 10.000 s"]
    late = (6.0, "store.renew", {"lease": 1})
    assert _judged(grant, late) == ["lease 1 was due at 5.000 s, and lives at 6.000 s"]
    away = (4.0, "pause", {"host": "store"})
    assert _judged(grant, away) == []
    assert _judged(grant, away, (9.999, "resume", {"host": "store"})) == []
