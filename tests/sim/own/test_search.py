"""`search`: from a function to a small failure, its file, its picture and the sentence about it."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from trinamo.sim import (
    BadScenario,
    Found,
    Hint,
    ReplayChoices,
    Violation,
    World,
    examine,
    search,
)
from trinamo.sim.core.choices import Choices
from trinamo.sim.explore import Scenario, load_failure, replay
from trinamo.sim.explore.swarm import JOBS_MAX


def dice(choices: Choices, faults: tuple[str, ...] = ("one", "two", "three")) -> None:
    """Some draws, of which one matters, and a plan of faults, of which one does."""
    world = World(choices)

    async def main() -> None:
        thrown = [choices.below(6, "die") for _ in range(8)]
        if thrown[3] == 5 and "two" in faults:
            raise Violation("no five", f"the fourth die shows {thrown[3]}")

    world.run(main)


def honest(choices: Choices) -> None:
    world = World(choices)

    async def main() -> None:
        choices.below(6, "die")

    world.run(main)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = Path(__file__).parents[3]
    monkeypatch.chdir(folder)
    return folder


def found_in(found: Found | None) -> Found:
    assert found is not None
    return found


@pytest.mark.usefixtures("here")
def test_a_failure_is_found_shrunk_saved_and_drawn(tmp_path: Path) -> None:
    found = found_in(search(dice, out=tmp_path / "out"))
    assert found.rule == found.violation.invariant == "no five"
    assert [(each.label, each.value) for each in found.decisions] == [("die", 5)]
    assert found.decisions_before > 1
    assert found.failure == tmp_path / f"out/test_search-dice-{found.seed}.json"
    assert found.page is not None
    assert "no five" in found.page.read_text()
    assert found.failure is not None
    recorded = load_failure(found.failure)
    assert recorded.scenario.parameters["faults"] == ["two"]
    assert recorded.scenario.parameters["file"] == "tests/sim/own/test_search.py"
    assert replay(recorded).is_exact


@pytest.mark.usefixtures("here")
def test_what_was_found_reads_as_what_a_person_wants_to_know(tmp_path: Path) -> None:
    found = found_in(search(dice, out=tmp_path))
    lines = str(found).splitlines()
    assert lines[0] == f"no five broken in tests/sim/own/test_search.py::dice, seed {found.seed}"
    assert "  the fourth die shows 5" in lines
    assert (
        f"{found.decisions_before} that are not the default before shrinking, 1 after" in lines[3]
    )
    assert "    die = 5 of 6" in lines
    assert f"  replay: trinamo sim replay {found.failure}" in lines
    assert f"  page: {found.page}" in lines


def test_the_search_ends_with_the_batch_in_which_a_failure_shows() -> None:
    played: list[int] = []
    found = found_in(search(dice, seeds=range(10_000), on_progress=lambda p: played.append(p.runs)))
    assert played[-1] == found.runs < 1000
    assert found.seed < found.runs


@pytest.mark.usefixtures("here")
def test_without_a_folder_nothing_is_written_and_the_seed_replays_it(tmp_path: Path) -> None:
    found = found_in(search(dice, shrink=False))
    assert (found.failure, found.page, list(tmp_path.iterdir())) == (None, None, [])
    assert found.replay == f"trinamo sim run tests/sim/own/test_search.py::dice --seed {found.seed}"
    assert len(found.decisions) == found.decisions_before


def test_from_elsewhere_the_replay_begins_in_the_folder_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = found_in(search(dice, out=Path("out")))
    folder = Path(__file__).parent
    assert found.replay == f"cd {folder} && trinamo sim replay {tmp_path / str(found.failure)}"


def test_nothing_found_is_none() -> None:
    assert search(honest, seeds=range(16)) is None


def test_a_function_inside_a_function_is_searched_but_not_saved(tmp_path: Path) -> None:
    def inner(choices: Choices) -> None:
        dice(choices)

    found = found_in(search(inner, out=tmp_path))
    assert found.failure is None
    assert found.page is not None
    assert found.replay == f"search(…, seeds=[{found.seed}])"
    with pytest.raises(BadScenario, match="top of a file"):
        search(inner, jobs=2)


def test_what_no_run_tested_is_warned_of() -> None:
    def waits_in_vain(world: World) -> None:
        async def main() -> None:
            world.choices.below(2, "coin")
            world.after_note("never", 1, world.kill, "a", name="the kill of a")

        world.run(main)

    with pytest.warns(Hint, match=r"the kill of a never struck: .*in none of 8 runs"):
        assert search(waits_in_vain, seeds=range(8)) is None


def test_a_run_that_is_no_function_of_its_seed_is_found_and_not_saved(tmp_path: Path) -> None:
    calls: list[None] = []

    def remembers(world: World) -> None:
        async def main() -> None:
            calls.append(None)
            world.note("call", number=len(calls))

        world.run(main)

    found = found_in(search(remembers, seeds=range(20, 30), out=tmp_path))
    assert found.rule == "determinism"
    assert (found.failure, found.decisions) == (None, ())


def test_a_failure_that_only_shows_once_is_told_as_it_was() -> None:
    calls: list[None] = []

    def fails_once(world: World) -> None:
        async def main() -> None:
            calls.append(None)
            if len(calls) == 1:
                raise Violation("once", "the first run failed")

        world.run(main)

    found = found_in(search(fails_once, seeds=[3]))
    assert (found.rule, found.decisions) == ("once", ())


def test_several_processes_find_the_same(tmp_path: Path) -> None:
    alone, together = search(dice), search(dice, jobs=2, out=tmp_path)
    assert found_in(alone).decisions == found_in(together).decisions


SCRIPT = """
import multiprocessing, sys
from trinamo.sim import Violation, search
from trinamo.sim.explore import swarm

sys.modules[swarm.__module__].FORKED_AFTER_S = 0.0
SIDES = 1

async def main(world):
    if world.choices.below(SIDES, "die") == 999:
        raise Violation("no 999", "the die shows it")

processes = []

def count(progress):
    processes.append(len(multiprocessing.active_children()))

SIDES = 1000
for jobs in (1, None):
    found = search(main, seeds=range(10_000), jobs=jobs, shrink=False, on_progress=count)
    print(found.seed, found.runs, found.failed_runs)
print(max(processes))
"""


def test_a_script_searches_in_as_many_processes_as_there_are_cores(tmp_path: Path) -> None:
    """It need not guard its main part, and what it changed in its module is changed in all of them."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, "utf-8")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=True
    )
    alone, together, processes = done.stdout.splitlines()
    assert alone == together
    cores = len(os.sched_getaffinity(0))
    assert int(processes) == (0 if cores == 1 else min(cores, JOBS_MAX)), done.stdout


def test_a_scenario_that_ships_is_searched_too() -> None:
    stale_ack = Scenario("trinamo.sim.programs.leased_queue", parameters={"fenced": False})
    found = found_in(search(stale_ack))
    assert found.rule == "I8"
    assert found.replay == f"search(…, seeds=[{found.seed}])"


@pytest.mark.parametrize("wrong", [3, lambda: None, lambda port: port])
def test_what_is_no_scenario_is_refused(wrong: object) -> None:
    with pytest.raises(BadScenario):
        search(wrong)  # type: ignore[arg-type]


def test_a_search_that_finds_nothing_in_a_healthy_scenario_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search(honest, seeds=range(16))


def test_what_hypothesis_drew_is_made_small_saved_and_told(tmp_path: Path) -> None:
    """In the place of hundreds of numbers: what matters, and how to play it again."""

    async def lucky(world: World) -> None:
        dice = [world.choices.below(10, f"die {number}") for number in range(300)]
        if dice[7] > 2 and dice[205] > 3:
            raise Violation("no luck", "two dice show too much")

    drawn = ReplayChoices([*range(9), 9] * 50, seed=3)
    found = examine(lucky, drawn, out=tmp_path)
    assert found is not None
    assert [(each.label, each.value) for each in found.decisions] == [("die 7", 3), ("die 205", 4)]
    assert found.page is not None
    assert found.page.exists()
    assert "no luck" in str(found)
    assert examine(lucky, ReplayChoices([])) is None
