"""`trinamo sim` on `FILE.py::function`: as for a scenario that ships, and no more of a stranger's file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from trinamo.cli.main import app
from trinamo.cli.sim.files import complete_scenario

Say = Callable[..., Result]

PROTOCOL = """\
from trinamo.sim import Violation, World


async def dice(world):
    thrown = [world.choices.below(6, "die") for _ in range(4)]
    world.note("thrown", sum=sum(thrown))
    if thrown[2] == 5:
        raise Violation("no five", "the third die shows 5")


def own_world(choices):
    world = World(choices)

    async def main():
        world.note("policy", of=world.policy)

    world.run(main)


async def escapes(world):
    import time

    time.sleep(1)
"""


@pytest.fixture
def sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Say]:
    """Runs `trinamo sim …` in a folder that holds `dice.py`."""
    monkeypatch.chdir(tmp_path)
    Path("dice.py").write_text(PROTOCOL)
    modules, path = set(sys.modules), list(sys.path)

    def run(*arguments: object) -> Result:
        result = CliRunner().invoke(app, ["sim", *map(str, arguments)])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        return result

    yield run
    for name in set(sys.modules) - modules:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
    sys.path[:] = path


@pytest.fixture
def failure(sim: Say) -> Path:
    found = sim("swarm", "dice.py::dice", "--seeds", "0..40", "--out", "found")
    assert found.exit_code == 1, found.output
    (path,) = Path("found").iterdir()
    assert f"trinamo sim replay {path}" in found.stdout
    return path


def test_a_function_is_run_and_drawn(sim: Say) -> None:
    seed = next(seed for seed in range(40) if sim("run", "dice.py::dice", "--seed", seed).exit_code)
    result = sim("run", "dice.py::dice", "--seed", seed, "--html", "o.html", "--save", "f.json")
    assert (result.exit_code, "no five broken: the third die shows 5" in result.stdout) == (1, True)
    assert f"dice.py::dice, seed {seed}" in Path("o.html").read_text()
    assert sim("replay", "f.json").exit_code == 1


def test_a_failure_is_found_replayed_shrunk_and_drawn(sim: Say, failure: Path) -> None:
    assert failure.name.startswith("dice-dice-")
    recorded = json.loads(failure.read_text())["scenario"]["parameters"]
    assert (recorded["file"], recorded["function"]) == ("dice.py", "dice")
    replayed = sim("replay", failure)
    assert (replayed.exit_code, replayed.stderr) == (1, "")
    assert "Every row is as recorded" in replayed.stdout
    shrunk = sim("shrink", failure)
    assert "1 decisions that are not the default" in shrunk.stdout
    assert sim("html", failure.with_suffix(".small.json"), "o.html").exit_code == 0
    assert sim("pin", failure, "--points", 2, "--runs", 2).exit_code == 0


def test_a_function_is_explored_and_compared(sim: Say) -> None:
    found = sim("explore", "dice.py::dice", "--max-dev", 1, "--save", "e.json")
    assert (found.exit_code, "Complete" in found.stdout) == (1, True)
    assert sim("replay", "e.json").exit_code == 1
    assert sim("diff", "dice.py::dice@1", "dice.py::dice@1").exit_code == 0


def test_a_swarm_over_two_processes_finds_the_same(sim: Say, failure: Path) -> None:
    found = sim("swarm", "dice.py::dice", "--seeds", "0..40", "--out", "two", "-j", 2)
    assert found.exit_code == 1, found.output
    assert (Path("two") / failure.name).read_text() == failure.read_text()


def test_digests_of_a_function_are_compared_between_processes(sim: Say) -> None:
    result = sim("check-determinism", "dice.py::own_world", "--seeds", "1..1")
    assert "6 runs of 1 seeds agree" in result.stdout


def test_another_policy_is_taken_where_the_world_is_made_here(sim: Say) -> None:
    assert sim("run", "dice.py::dice", "--policy", "step").exit_code in (0, 1)
    refused = sim("run", "dice.py::own_world", "--policy", "step")
    assert (refused.exit_code, "give it a parameter `policy`" in refused.stderr) == (2, True)


def test_code_that_reaches_for_the_real_world_exits_with_4(sim: Say) -> None:
    assert sim("run", "dice.py::escapes").exit_code == 4


def test_a_replay_says_that_the_file_changed(sim: Say, failure: Path) -> None:
    with Path("dice.py").open("a") as file:
        file.write("# another line\n")
    replayed = sim("replay", failure)
    assert "dice.py has changed since this was recorded" in replayed.stderr
    assert replayed.exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "dice.py::dicce"), "has no function 'dicce'"),
        (("run", "dice.py"), "say which scenario of dice.py"),
        (("run", "nowhere.py::dice"), "nowhere.py cannot be read"),
        (("run", "dice.py::dice", "--bug", "stale_ack"), "--bug"),
        (("conform", "dice.py::dice"), "is code"),
    ],
)
def test_what_cannot_be_played_is_a_sentence(
    sim: Say, arguments: tuple[str, ...], words: str
) -> None:
    result = sim(*arguments)
    lines = result.stderr.strip().splitlines()
    assert (result.exit_code, len(lines)) == (2, 1), result.output
    assert words in lines[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"file": "../elsewhere.py"}, "not below this folder"),
        ({"file": "/etc/passwd"}, "not below this folder"),
        ({"function": "os"}, "has no scenario function 'os'"),
        ({"function": 3}, "scenario.parameters must be"),
        ({"extra": 1}, "scenario.parameters must be"),
        ({"faults": "all"}, "scenario.parameters must be"),
        ({"policy": "lifo"}, "policy"),
    ],
)
def test_a_failure_file_names_only_scenarios_below_this_folder(
    sim: Say, failure: Path, change: dict[str, object], words: str
) -> None:
    content = json.loads(failure.read_text())
    content["scenario"]["parameters"] |= change
    failure.write_text(json.dumps(content))
    result = sim("replay", failure)
    assert result.exit_code == 2, result.output
    assert words in result.stderr


@pytest.mark.usefixtures("sim")
def test_files_and_their_functions_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMP_WORDS", raising=False)
    all_of_it = ["dice.py::dice", "dice.py::own_world", "dice.py::escapes"]
    assert complete_scenario("di") == all_of_it
    assert complete_scenario("dice.py::") == all_of_it
    assert complete_scenario("dice.py::d") == ["dice.py::dice"]
    assert complete_scenario("nowhere.py::d") == []


def test_hints_are_said_where_a_run_is_judged_and_fail_nothing(sim: Say) -> None:
    healthy = next(
        result
        for n in range(9)
        if not (result := sim("run", "dice.py::dice", "--seed", n)).exit_code
    )
    assert "Hint" not in healthy.stdout
    for command in (("run",), ("swarm", "--seeds", "1..4")):
        still = sim(*command, "dice.py::own_world")
        assert (still.exit_code, "Hint: " in still.stdout) == (0, True)
        assert "nothing can go wrong in this run" in still.stdout
    Path("unchecked.py").write_text("async def main(world):\n    world.choices.below(2, 'coin')\n")
    assert "nothing is checked in unchecked.py" in sim("run", "unchecked.py").stdout
