"""`trinamo sim`: what it finds, what it writes, what it exits with, and what it refuses to touch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from trinamo.cli.main import app
from trinamo.cli.sim.files import (
    FILE_SCENARIO,
    catalogue_names,
    complete_scenario,
    exit_code_for,
    scenario_of,
    seeds_of,
)
from trinamo.sim import explore
from trinamo.sim.explore import Failure, played, save_failure

Say = Callable[..., Result]


@pytest.fixture
def sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Runs `trinamo sim …` in a folder of its own; the exit code and both outputs."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Result:
        result = CliRunner().invoke(app, ["sim", *map(str, arguments)])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        return result

    return run


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A failure file of the planted stale acknowledgement."""
    play = scenario_of("s10_stale_ack", bug="stale_ack")
    failing = next(r for seed in range(100) if (r := played(play, seed)).run.finding)
    path = tmp_path_factory.mktemp("failure") / "failure.json"
    save_failure(Failure.of(play, failing), path)
    return path.read_bytes()


@pytest.fixture
def failure(recorded: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "failure.json"
    path.write_bytes(recorded)
    return path


def changed(failure: Path, **fields: Any) -> Path:
    content = json.loads(failure.read_text()) | fields
    failure.write_text(json.dumps(content))
    return failure


def refused(result: Result, *words: str) -> None:
    lines = result.stderr.strip().splitlines()
    assert (result.exit_code, len(lines)) == (2, 1), result.output
    assert [word for word in words if word not in lines[0]] == [], lines[0]


# --- what the commands do ----------------------------------------------------------------------


def test_a_run_without_a_violation_exits_with_0(sim: Say) -> None:
    result = sim("run", "s10_stale_ack", "--seed", 1)
    assert result.exit_code == 0
    assert "No rule was broken" in result.stdout
    assert "digest" in result.stdout


def test_a_violation_exits_with_1_and_is_kept(sim: Say, tmp_path: Path) -> None:
    found = sim(
        "swarm", "s10_stale_ack", "--bug", "stale_ack", "--seeds", "0..40", "--out", "found"
    )
    assert found.exit_code == 1
    assert "I8 broken" in found.stdout
    # Every run that broke the rule in the same way is in one file.
    assert len(list((tmp_path / "found").iterdir())) == 1


def test_a_failure_replays_shrinks_and_replays_again(sim: Say, failure: Path) -> None:
    replayed = sim("replay", failure)
    assert (replayed.exit_code, "as recorded" in replayed.stdout) == (1, True)
    shrunk = sim("shrink", failure, "-o", "small.json")
    assert shrunk.exit_code == 0
    assert "1 decisions that are not the default" in shrunk.stdout
    assert sim("replay", "small.json").exit_code == 1


def test_a_replay_prints_what_happens_until_a_time(sim: Say, failure: Path) -> None:
    lines = sim("replay", failure, "--until", "0.5").stdout.splitlines()
    times = [float(line.split()[0]) for line in lines if " queue.1 " in line]
    assert times
    assert max(times) <= 0.5


def test_the_page_of_a_failure_is_written(sim: Say, failure: Path, tmp_path: Path) -> None:
    assert sim("html", failure, "out.html").exit_code == 0
    assert "space-time" in (tmp_path / "out.html").read_text().lower()
    assert sim("run", "s10_stale_ack", "--html", "run.html").exit_code == 0
    assert (tmp_path / "run.html").stat().st_size <= 2_000_000


def test_a_bounded_search_says_that_it_was_complete(sim: Say) -> None:
    fixed = sim("explore", "s10_stale_ack", "--max-dev", 1)
    assert (fixed.exit_code, "Complete" in fixed.stdout) == (0, True)
    broken = sim(
        "explore", "s10_stale_ack", "--max-dev", 1, "--bug", "stale_ack", "--save", "e.json"
    )
    assert (broken.exit_code, "Complete" in broken.stdout) == (1, True)
    assert sim("replay", "e.json").exit_code == 1
    short = sim("explore", "s10_stale_ack", "--max-dev", 2, "--runs-max", 3)
    assert "Not complete" in short.stdout


def test_the_moment_a_failure_became_inevitable_is_shown(sim: Say, failure: Path) -> None:
    result = sim("pin", failure, "--points", 4, "--runs", 3)
    assert result.exit_code == 0
    assert "inevitable" in result.stdout


def test_two_runs_are_compared_row_by_row(sim: Say, failure: Path) -> None:
    same = sim("diff", "s10_stale_ack@3", "s10_stale_ack@3")
    assert (same.exit_code, "the same" in same.stdout) == (0, True)
    picture = failure.with_name("both.html")
    other = sim("diff", failure, "s10_stale_ack@3", "--html", picture)
    assert (other.exit_code, "first difference" in other.stdout) == (1, True)
    assert picture.read_text("utf-8").count("<iframe ") == 2


def test_digests_are_compared_between_processes(sim: Say) -> None:
    result = sim("check-determinism", "s10_stale_ack", "--seeds", "1..1")
    assert (result.exit_code, "6 runs of 1 seeds agree" in result.stdout) == (0, True)


def test_a_swarm_over_two_processes_shows_no_log_of_theirs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trinamo.cli", "sim", "swarm", "kill", "--seeds", "1..4", "-j", "2"],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_minutes_give_every_scenario_its_share(sim: Say) -> None:
    result = sim("swarm", "s10_stale_ack", "s10_stale_ack", "--minutes", "0.002")
    assert result.exit_code == 0
    assert "of 2 scenarios" in result.stdout


def test_the_catalogue_is_listed(sim: Say) -> None:
    text = sim("list").stdout
    assert [name for name in catalogue_names() if name not in text] == []


def test_another_policy_is_another_schedule(sim: Say) -> None:
    results = [sim("run", "kill", "--policy", policy).stdout for policy in ("batch", "pct")]
    assert results[0] != results[1]


def test_streams_travel_on_the_carrier_that_is_asked_for(sim: Say) -> None:
    results = [
        sim("run", "kill", "--streams", streams).stdout for streams in ("multiplexed", "dedicated")
    ]
    assert results[0] != results[1]


@pytest.mark.parametrize(
    ("invariant", "code"),
    [(None, 0), ("I8", 1), ("deadlock", 1), ("determinism", 3), ("escape", 4)],
)
def test_the_exit_code_tells_what_kind_of_failure(invariant: str | None, code: int) -> None:
    assert exit_code_for(invariant) == code


def test_names_of_shipped_scenarios_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "storage.toml").touch()
    assert complete_scenario("sto") == ["stop", "stop_then_kill", "storm", "storage.toml"]


@pytest.mark.parametrize(
    "command",
    [
        "run", "swarm", "replay", "shrink", "explore", "pin", "diff", "html",
        "check-determinism", "conform", "list",
    ],
)  # fmt: skip
def test_every_command_has_help_with_examples(sim: Say, command: str) -> None:
    result = sim(command, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout


def test_the_tree_of_commands_loads_no_simulator() -> None:
    code = (
        "import sys, trinamo.cli.main\n"
        "print([m for m in sys.modules if f'{m}.'.startswith('trinamo.sim.')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == "[]"


# --- what is refused -----------------------------------------------------------------------------


def test_an_unknown_scenario_is_told_the_nearest_name(sim: Say) -> None:
    refused(sim("run", "strom"), "'strom'", "'storm'")


def test_a_mistake_in_a_scenario_names_file_and_line(sim: Say, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('name = "mine"\nabout = "x"\n[limits]\nstepz = 3\n')
    refused(sim("run", "mine.toml"), "mine.toml, line 4", "'steps'")


def test_an_unknown_bug_is_refused(sim: Say) -> None:
    refused(sim("run", "kill", "--bug", "no_such"), "no_such")


@pytest.mark.parametrize("seeds", ["5..1", "a..b", "-3..1", ""])
def test_seeds_that_are_none_are_refused(sim: Say, seeds: str) -> None:
    refused(sim("swarm", "kill", f"--seeds={seeds}"), "--seeds")


def test_seeds_include_both_ends() -> None:
    assert (list(seeds_of("1..3")), list(seeds_of("7"))) == ([1, 2, 3], [7])


def test_more_hosts_than_can_be_simulated_are_refused(sim: Say, tmp_path: Path) -> None:
    (tmp_path / "huge.toml").write_text(
        'name = "huge"\nabout = "x"\n[cluster]\nworkers = 2000000000000\n'
    )
    refused(sim("run", "huge.toml"), "at most 1000 hosts")


def test_a_file_that_is_not_there_is_one_sentence(sim: Say) -> None:
    for command in (("replay",), ("shrink",), ("html", "page.html"), ("pin",)):
        words = (command[0], "nowhere.json", *command[1:])
        refused(sim(*words), "nowhere.json cannot be read: No such file or directory")
    refused(sim("replay", "/"), "/ cannot be read: Is a directory")


def test_a_truncated_failure_file_is_one_sentence(sim: Say, failure: Path) -> None:
    failure.write_bytes(failure.read_bytes()[:200])
    refused(sim("replay", failure), "no JSON")


def test_another_schema_is_named(sim: Say, failure: Path) -> None:
    refused(sim("replay", changed(failure, schema="trinamo.sim-failure/9")), "sim-failure/9")


def test_other_versions_are_named_and_replayed_loosely(sim: Say, failure: Path) -> None:
    versions = json.loads(failure.read_text())["versions"] | {"trio": "0.1"}
    changed(failure, versions=versions)
    refused(sim("replay", failure), "trio was 0.1", "--loose")
    assert sim("replay", failure, "--loose").exit_code == 1


def test_a_replay_that_departs_says_at_which_row_and_exits_with_3(sim: Say, failure: Path) -> None:
    seed = json.loads(failure.read_text())["seed"]
    changed(failure, seed=seed + 1)
    result = sim("replay", failure)
    assert result.exit_code == 3
    assert "row" in result.stderr
    assert "the order of a set of texts (sort it)" in result.stderr
    assert sim("replay", failure, "--loose").exit_code in (0, 1)


@pytest.mark.parametrize(
    "scenario",
    [
        {"module": "os", "function": "system", "parameters": {}},
        {"module": "trinamo.cli.main", "function": "main", "parameters": {}},
        {"module": "trinamo.sim.scenario.play", "function": "play_of", "parameters": {}},
        {"module": "trinamo.sim.scenario.play", "function": "run", "parameters": {}},
        {"module": "trinamo.sim.scenario.play", "function": "run", "parameters": {"text": 3}},
        {"module": "trinamo.sim.scenario.play", "function": "run", "parameters": {"text": "x = ["}},
        {"module": "trinamo.sim.programs.leased_queue", "function": "Bus", "parameters": {}},
        {"module": "trinamo.sim.programs.nothing", "function": "run", "parameters": {}},
        {"module": "trinamo.sim.programs.leased_queue", "function": "run", "parameters": {"jobs": 10**9}},
        {"module": "trinamo.sim.programs.leased_queue", "function": "run", "parameters": {"x": 1}},
        [],
        None,
    ],
    ids=str,
)  # fmt: skip
def test_a_failure_file_names_nothing_but_scenarios(
    sim: Say, failure: Path, monkeypatch: pytest.MonkeyPatch, scenario: object
) -> None:
    """Nothing is played, whatever the file asks for."""
    monkeypatch.setattr(explore, "replay", None)
    refused(sim("replay", changed(failure, scenario=scenario)))


@pytest.mark.parametrize("faults", [["x"], [-1], [99], {}, [[]], "all"], ids=str)
def test_faults_that_the_scenario_does_not_have_are_refused(
    sim: Say, failure: Path, faults: object
) -> None:
    scenario = json.loads(failure.read_text())["scenario"]
    assert scenario["module"] == FILE_SCENARIO
    scenario["parameters"]["faults"] = faults
    refused(sim("replay", changed(failure, scenario=scenario)), "faults")


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 50, b"[" * 50_000, b'{"a":' * 10_000, b'"' + b"x" * 200_000 + b'"', b"\xff\xfe"],
    ids=["nothing", "zeros", "deep list", "deep object", "huge", "no text"],
)
@pytest.mark.parametrize("command", ["replay", "shrink", "pin", "diff", "html"])
def test_nonsense_is_refused_by_every_command(
    sim: Say, failure: Path, command: str, content: bytes
) -> None:
    failure.write_bytes(content)
    more: dict[str, list[object]] = {"html": ["out.html"], "diff": [failure]}
    refused(sim(command, failure, *more.get(command, [])))


@pytest.mark.parametrize(
    "name", ["seed", "choices", "digest", "violation", "rows", "marks", "versions", "scenario"]
)
@pytest.mark.parametrize("value", [-1, "x", [1], {"count": -5}, 1e400, True], ids=str)
def test_fields_of_the_wrong_type_are_refused(
    sim: Say, failure: Path, name: str, value: object
) -> None:
    is_right = (name, value) in (("seed", -1), ("digest", "x"))
    result = sim("replay", changed(failure, **{name: value}))
    assert result.exit_code == (3 if is_right else 2), result.output
    assert "Traceback" not in result.output


def test_a_page_that_cannot_be_written_is_one_sentence(sim: Say) -> None:
    refused(sim("run", "s10_stale_ack", "--html", "/nowhere/at/all.html"), "/nowhere/at/all.html")


def test_what_loopback_cannot_do_is_refused_by_name(sim: Say) -> None:
    refused(sim("conform", "storm"), "pause", "cut")
    refused(sim("conform", "s10_stale_ack"), "no cluster")
