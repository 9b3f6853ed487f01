"""`make reach`: which statements of `runtime/` and `transports/` no simulated run of the catalogue executes.

Every shipped scenario is played on a few seeds under coverage.py, and the modules are listed by what was
missed, worst first. What is met by real servers only (gRPC, NIXL, llama.cpp, a browser's page) is among it,
and so is what only an operator calls; a protocol that shows up here is one that no fault has met.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
from collections import Counter

import attrs
import coverage
from rich.progress import track

from tests.sources import ROOT

FLOORS = ("runtime", "transports")


@attrs.frozen
class Reached:
    """One module: how many statements it has, and how many of them were never executed."""

    name: str
    statements: int
    missed: int


def played(seeds: list[int], names: list[str]) -> coverage.Coverage:
    """Play the scenarios of these names, or all, and tell what was executed."""
    measured = coverage.Coverage(
        data_file=None,
        config_file=False,
        source=[f"trinamo.{floor}" for floor in FLOORS],
        messages=False,
    )
    # No statements: what only type checkers read, and bodies of protocols.
    for each in (r"if TYPE_CHECKING:", r"^\s*\.\.\.$"):
        measured.exclude(each)
    measured.start()
    # Imported under measurement: what a module executes at its top counts.
    from trinamo.sim import SeedChoices
    from trinamo.sim.catalogue import scenario_paths
    from trinamo.sim.scenario.file import load_scenario
    from trinamo.sim.scenario.run import run_scenario

    scenarios = [path for path in scenario_paths() if not names or path.stem in names]
    for path in track(scenarios, "playing", disable=not sys.stderr.isatty()):
        for seed in seeds:
            run_scenario(load_scenario(path), SeedChoices(seed))
    measured.stop()
    return measured


def modules(measured: coverage.Coverage) -> list[Reached]:
    """What was reached of each module, also of those that no run imported."""
    found = []
    for floor in FLOORS:
        for path in sorted((ROOT / floor).rglob("*.py")):
            inside = ROOT / "src" / "trinamo" / path.relative_to(ROOT)
            _, statements, _, missing, _ = measured.analysis2(str(inside))
            name = path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__")
            found.append(Reached(name, len(statements), len(missing)))
    return found


def told(found: list[Reached], count: int) -> str:
    """The table: floors and rooms first, then the modules that were missed most."""
    out = io.StringIO()
    for floor in FLOORS:
        of_floor = [each for each in found if each.name.split("/")[0] == floor]
        _row(out, floor, of_floor)
        rooms = Counter("/".join(each.name.split("/")[:2]) for each in of_floor)
        for room in sorted(rooms.keys() - {floor}):
            _row(out, f"  {room}", [e for e in of_floor if f"{e.name}/".startswith(f"{room}/")])
    _row(out, "in all", found)
    out.write(f"\nThe {count} modules that were missed most:\n")
    for each in sorted(found, key=lambda each: each.missed, reverse=True)[:count]:
        _row(out, f"  {each.name}", [each])
    return out.getvalue()


def _row(out: io.StringIO, name: str, of: list[Reached]) -> None:
    statements, missed = sum(e.statements for e in of), sum(e.missed for e in of)
    share = missed / statements if statements else 0.0
    out.write(f"{name:55} {missed:6,} of {statements:6,}  {share:4.0%}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="make reach",
        description="Statements of runtime/ and transports/ that no run of the catalogue executes.",
        epilog='Example: make reach ARGS="--seeds 5 --most 60 storm worker_dies"',
    )
    parser.add_argument("scenarios", nargs="*", help="which; all if none is named")
    parser.add_argument("--seeds", type=int, default=2, help="how many runs of each (2)")
    parser.add_argument("--most", type=int, default=40, help="how many modules to list (40)")
    given = parser.parse_args()
    first = random.SystemRandom().randrange(2**31)
    seeds = list(range(first, first + given.seeds))
    print(f"seeds {first} to {seeds[-1]}")
    print(told(modules(played(seeds, given.scenarios)), given.most), end="")


if __name__ == "__main__":
    main()
