"""`make search`: every scenario and every property over fresh seeds, until the time is up.

Scenarios are played under each policy, a few seeds at a time and more of those under policies that find
something (`portfolio.py`); files of properties and the published libraries' scenarios beside them, each
about as long. What fails is kept in a folder, with the command that plays it again. Read next: `work.py`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, get_args

import attrs

from tests.clients.environments import InstallError
from tests.published.test_published import ENVIRONMENT, SCENARIOS
from tests.search.portfolio import Portfolio
from tests.search.work import Examined, Properties, Published, Seeds, hush, property_files
from trinamo.cli.sim.files import (
    EXIT_UNSTEADY,
    catalogue_names,
    exit_code_for,
    resolve,
    save_played,
)
from trinamo.cli.sim.text import finding_lines, quietly
from trinamo.runtime.protocol.streams.request import Carrier
from trinamo.sim.core.choices import ReplayChoices
from trinamo.sim.core.policies import Policy
from trinamo.sim.explore import Finding, Progress, Run, played
from trinamo.sim.scenario.file import load_scenario

POLICIES: Final = get_args(Policy)
SEEDS: Final = 3
"""How many seeds a scenario is played with before the next one has its turn."""
LIBRARY_SEEDS: Final = 10
PUBLISHED: Final = "published/"
SHOWN_S: Final = 10.0
COVERED_RUNS: Final = 60
"""After so many runs of a scenario, what none of them has shown is told."""

EXAMPLES: Final = """examples:
  make search MINUTES=60
  make search ARGS="--only storm --only kill --policy step"
  make search ARGS="--only properties/simulated/test_cluster_survives.py"
  make search ARGS="--only published/anyio_"
"""

Piece = Seeds | Properties | Published


@attrs.define
class Ledger:
    """What was played, and what came of it."""

    out: Path
    jobs: int
    portfolio: Portfolio
    progress: dict[str, Progress] = attrs.field(factory=dict)
    """By scenario."""
    rounds: dict[str, int] = attrs.field(factory=dict)
    """How often the properties of a file, or seeds of a library's scenario, were examined."""
    failures: dict[str, list[str]] = attrs.field(factory=dict)
    """Lines to print, by what makes two failures the same."""
    spent_s: dict[type, float] = attrs.field(factory=lambda: defaultdict(float))

    def add(self, piece: Piece, result: list[Run] | Examined, took_s: float) -> None:
        """Count one piece that is done, and keep what failed."""
        self.spent_s[type(piece)] += took_s
        if isinstance(piece, Seeds):
            assert isinstance(result, list)
            before = len(self.failures)
            for run in result:
                self._add_run(piece, run)
            found = len(self.failures) - before
            self.portfolio.add(piece.policy, runs=len(result), found=found)
        else:
            assert isinstance(result, Examined)
            self._add_examined(piece, result)

    def _add_run(self, piece: Seeds, run: Run) -> None:
        self.progress.setdefault(piece.name, Progress()).add(run)
        if run.finding is not None:
            key = f"{piece.name}: {run.finding.key}"
            if key not in self.failures:
                self.failures[key] = self._kept(piece, run, run.finding)

    def _kept(self, piece: Seeds, run: Run, finding: Finding) -> list[str]:
        on = f" on {piece.streams} streams" if piece.streams else ""
        where = f"{piece.name} under {piece.policy}{on}, seed {run.seed}"
        lines = [where, *finding_lines(finding)]
        if exit_code_for(finding.invariant) != EXIT_UNSTEADY:
            words = (piece.name, piece.policy, piece.streams or "", str(run.seed))
            path = self.out / f"{'-'.join(filter(None, words))}.json"
            with quietly():
                again = played(piece.play, ReplayChoices(run.values, run.seed))
                save_played(piece.play, again, path)
            lines.append(f"  {sys.executable} -m trinamo.cli sim replay {path}")
        return lines

    def _add_examined(self, piece: Properties | Published, examined: Examined) -> None:
        self.rounds[piece.file] = self.rounds.get(piece.file, 0) + 1
        for test in examined.failed:
            if test not in self.failures:
                said = self.out / f"{Path(piece.file).stem}-{len(self.failures)}.txt"
                said.write_text(examined.output, "utf-8")
                self.failures[test] = [f"{test}, see {said}", f"  {piece.command(test)}"]

    def look_for_gaps(self) -> None:
        """What a scenario is about and no run of it has shown was not tested at all."""
        for name, progress in self.progress.items():
            if progress.runs >= COVERED_RUNS:
                for text in progress.coverage.untested:
                    self.failures[f"{name}: {text}"] = [
                        f"{name}: {text}, in none of {progress.runs} runs: it was not tested"
                    ]

    def __str__(self) -> str:
        runs = sum(progress.runs for progress in self.progress.values())
        return (
            f"{runs} runs of {len(self.progress)} scenarios,"
            f" {sum(self.rounds.values())} rounds of {len(self.rounds)} others,"
            f" {len(self.failures)} failures"
        )


def seeds_of(
    options: argparse.Namespace, dice: random.Random, portfolio: Portfolio
) -> Iterator[Seeds]:
    """Every scenario as often as there are policies, and again with other seeds."""
    names = [each for each in options.only if not is_no_scenario(each)]
    names = names if options.only else catalogue_names()
    plays = [
        (name, streams) for name in names for streams in carriers_of(name, options.streams)
    ] * len(portfolio.policies)
    for first in itertools.count(options.first, SEEDS) if plays else ():
        dice.shuffle(plays)
        for name, streams in plays:
            policy = portfolio.next((name, streams))
            yield Seeds(name, policy, first, SEEDS, options.bug, streams)


def is_no_scenario(asked: str) -> bool:
    return asked.endswith(".py") or asked.startswith(PUBLISHED)


def carriers_of(name: str, asked: list[str]) -> list[str | None]:
    """What the streams of a scenario are to travel on; None leaves it to the file."""
    scenario = load_scenario(resolve(name))
    if scenario.queue is not None or scenario.streams is not None:
        return [None]
    return [*(asked or Carrier)]


def properties_of(options: argparse.Namespace, dice: random.Random) -> Iterator[Properties]:
    """Every file of properties, and again: hypothesis draws other examples each time."""
    files = [each for each in options.only if each.endswith(".py")]
    files = files if options.only else property_files()
    while files:
        dice.shuffle(files)
        for file in files:
            yield Properties(file, options.out / "hypothesis")


def published_of(options: argparse.Namespace, dice: random.Random) -> Iterator[Published]:
    """Each library's scenario, and again with other seeds, if their environment can be made."""
    asked = [each.removeprefix(PUBLISHED) for each in options.only if each.startswith(PUBLISHED)]
    scenarios = [each for each in SCENARIOS if each.name in asked or not options.only]
    try:
        if scenarios:
            ENVIRONMENT.make()
    except InstallError as error:
        print(f"without the published libraries: {error}")
        return
    for first in itertools.count(options.first, LIBRARY_SEEDS) if scenarios else ():
        dice.shuffle(scenarios)
        for each in scenarios:
            yield Published(each.name, each.finds, first, LIBRARY_SEEDS, ENVIRONMENT.folder)


def search(options: argparse.Namespace, ledger: Ledger) -> None:
    """Play until the time is up; what is under way then is played to its end."""
    dice = random.Random(options.first)
    supplies: dict[type, Iterator[Piece]] = {
        Seeds: seeds_of(options, dice, ledger.portfolio),
        Properties: properties_of(options, dice),
        Published: published_of(options, dice),
    }
    running: dict[Future[Any], tuple[Piece, float]] = {}

    def is_time_up() -> bool:
        return bool(time.monotonic() >= options.started_s + 60 * options.minutes)

    def next_piece() -> Piece:
        """Of the kind that has had less, if there is any of it."""
        under_way = [type(piece) for piece, _ in running.values()]
        kinds = sorted(supplies, key=lambda kind: (under_way.count(kind), ledger.spent_s[kind]))
        return next(itertools.chain(*(supplies[kind] for kind in kinds)))

    with ProcessPoolExecutor(ledger.jobs, get_context("spawn"), hush) as pool:
        # At least one piece, so that a short time still says something.
        while not is_time_up() or running or not any(ledger.spent_s.values()):
            while len(running) < ledger.jobs and not (running and is_time_up()):
                piece = next_piece()
                running[pool.submit(piece)] = (piece, time.monotonic())
            done, _ = wait(running, SHOWN_S, FIRST_COMPLETED)
            for future in done:
                piece, began_s = running.pop(future)
                ledger.add(piece, future.result(), time.monotonic() - began_s)
            show(options, ledger)


def show(options: argparse.Namespace, ledger: Ledger) -> None:
    """How far it is, now and then."""
    now_s = time.monotonic()
    if now_s >= options.shown_s + SHOWN_S:
        options.shown_s = now_s
        print(f"{now_s - options.started_s:6.0f} s: {ledger}", flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="make search", description=__doc__, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("--minutes", type=float, default=10.0, help="how long (10)")
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (all cores)")
    made.add_argument("--out", type=Path, default=Path("failures"), help="where failures are kept")
    made.add_argument(
        "--only", action="append", default=[], metavar="NAME",
        help="only this scenario, file of properties or published/NAME; several times for several",
    )  # fmt: skip
    made.add_argument(
        "--policy", action="append", choices=POLICIES, help="only this one; several times likewise"
    )
    made.add_argument(
        "--streams", action="append", choices=[*Carrier], help="only on this carrier; likewise"
    )
    made.add_argument(
        "--first", type=int, default=time.time_ns() % 10**9, help="the first seed (by the clock)"
    )
    made.add_argument("--bug", default="", help="a mistake to plant, as the mutants do")
    return made


def main() -> int:
    """Search, and say what failed; 1 if anything did."""
    options = parser().parse_args()
    options.started_s = options.shown_s = time.monotonic()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    portfolio = Portfolio(options.policy or POLICIES)
    ledger = Ledger(options.out, options.jobs, portfolio)
    print(f"from seed {options.first}, {options.minutes:g} minutes", flush=True)
    try:
        search(options, ledger)
    except KeyboardInterrupt:
        print("interrupted")
    ledger.look_for_gaps()
    print(f"{time.monotonic() - options.started_s:.0f} s: {ledger}")
    if ledger.progress:
        print(f"policies, and their shares of what would be next: {portfolio}")
    for lines in ledger.failures.values():
        print("\n" + "\n".join(lines))
    if ledger.failures:
        print(f"\nWhat failed is kept in {options.out}.")
    return int(bool(ledger.failures))


if __name__ == "__main__":
    sys.exit(main())
