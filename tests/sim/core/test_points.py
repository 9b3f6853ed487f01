"""Points of a program: found by themselves in a run, nothing outside of one."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
import trio

from trinamo.points import barrier, note, reached, sometimes
from trinamo.sim import ReplayChoices, SeedChoices, World
from trinamo.sim.core.labels import labels_below


async def test_points_do_nothing_outside_a_run() -> None:
    note("lead", term=1, kind="any")
    reached("the end")
    await barrier("the gate")
    assert not any(sometimes("bad luck") for _ in range(100))


def test_points_are_imported_without_the_simulator_and_trio() -> None:
    code = "import sys, trinamo.points; print([m for m in ('trio', 'trinamo.sim', 'attrs', 'msgspec') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def played(values: list[int]) -> World:
    world = World(ReplayChoices(values))

    async def host() -> None:
        note("lead", term=1)
        if sometimes("bad luck", 3):
            reached("trouble")

    async def main() -> None:
        await world.boot("a", host).ended.wait()

    world.run(main)
    return world


def test_points_of_a_run_are_notes_of_the_host_that_passes_them() -> None:
    world = played([1])
    assert [
        (row.host, row.kind)
        for row in world.trace.rows
        if row.kind in ("lead", "bad luck", "trouble")
    ] == [("a.1", "lead"), ("a.1", "bad luck"), ("a.1", "trouble")]
    assert [tuple(choice) for choice in world.choices.record] == [("bad luck", 3, 1)]
    assert not sometimes("bad luck"), "the run is over"


def test_the_dull_answer_is_that_nothing_happens() -> None:
    world = played([])
    assert not world.trace.of_kind("trouble")
    assert 'nobody reached the point "trouble"' in world.untested
    assert 'nobody reached the point "trouble"' not in played([1]).untested


def test_only_points_of_the_code_of_a_run_must_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module counts if a process began in it, or in one that imports it."""
    assert "trouble" in labels_below({__name__})
    user = ModuleType("user_of_points")
    vars(user)["played"] = played
    monkeypatch.setitem(sys.modules, user.__name__, user)
    assert "trouble" in labels_below({"user_of_points"})
    assert labels_below({"json"}) == frozenset()


def test_a_scenario_holds_whoever_comes_to_a_barrier_and_lets_them_go() -> None:
    world = World(SeedChoices(0))
    passed: list[float] = []

    async def host() -> None:
        await barrier("commit")
        passed.append(trio.current_time())
        await barrier("open to all")

    async def main() -> None:
        gate = world.hold("commit")
        world.after_note("commit", 1, gate.set, delay_s=2)
        await world.boot("a", host).ended.wait()

    world.run(main)
    assert passed == [2.0]
