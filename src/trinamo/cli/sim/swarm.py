"""The long searches and comparisons of `trinamo sim`, with their progress on standard error."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .files import (
    EXIT_BROKEN,
    EXIT_UNSTEADY,
    UNSTEADY,
    catalogue_names,
    exit_code_for,
    refuse,
    resolve,
    save_played,
)
from .text import finding_lines, hint_lines, is_under_pct, promise_line, quietly, say

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from trinamo.sim.explore import Failure, Scenario, Search, Shrunk
    from trinamo.sim.explore.swarm import Progress


SAID_MAX: Final = 4000
LISTED_MAX: Final = 20
EXPLORE_SECONDS_A_LINE: Final = 0.2
STRANGE_MAX: Final = 5
CONTEXT: Final = 3


@contextmanager
def _bar(total: float | None) -> Iterator[tuple[Bar, Any]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    # A file of its own, so that it goes on to show while standard error is elsewhere.
    with os.fdopen(os.dup(2), "w", encoding="utf-8") as screen:
        console = Console(file=screen, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[said]}"),
        )
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            yield bar, bar.add_task("", total=total, said="")


@contextmanager
def _children_unheard(jobs: int | None) -> Iterator[None]:
    """What the processes of a swarm log is shown only if one of them fails."""
    if jobs == 1:
        with quietly():
            yield
        return
    sys.stderr.flush()
    screen = os.dup(2)
    with quietly(), tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        except Exception:
            size = said.seek(0, os.SEEK_END)
            said.seek(max(0, size - SAID_MAX))
            os.write(screen, said.read())
            raise
        finally:
            os.dup2(screen, 2)
            os.close(screen)


def search(
    plays: Sequence[Scenario],
    seeds: range | None,
    minutes: float | None,
    *,
    jobs: int | None,
    out: Path,
) -> int:
    """Swarm over every scenario, by seeds or by time; save what failed. The exit code."""
    from trinamo.sim.explore import swarm
    from trinamo.sim.own import label_of, standing_hints

    total = None if seeds is None else len(seeds) * len(plays)
    code = runs = 0
    virtual_s = 0.0
    started_s = time.perf_counter()
    with _bar(total) as (bar, task):
        for number, play in enumerate(plays):
            name, before = label_of(play), runs
            bar.update(task, description=name)

            def show(progress: Progress, before: int = before) -> None:
                said = f"{len(progress.failures)} kinds of failure" if progress.failures else ""
                bar.update(task, completed=before + progress.runs, said=said)

            supply: Any = seeds
            if minutes is not None:
                share_s = minutes * 60 / len(plays)
                supply = _until(started_s + (number + 1) * share_s)
            with _children_unheard(jobs):
                progress = swarm(play, supply, jobs=jobs, on_progress=show)
            runs += progress.runs
            virtual_s += progress.virtual_s
            code = max(code, _save_failures(play, name, progress, out, bar))
            bar.stop()
            if is_under_pct(play) and progress.runs:
                say(f"{name}: {promise_line(progress.runs, progress.steps // progress.runs)}")
            for text in progress.coverage.untested:
                say(f"{name}: {text}, in none of {progress.runs} runs: it was not tested")
                code = max(code, EXIT_BROKEN)
            hints = [] if progress.failures else [*progress.hints, *standing_hints(play, progress)]
            say(*hint_lines(f"{name}: {hint}" for hint in hints))
            bar.start()
    took_s = time.perf_counter() - started_s
    say(
        f"{runs} runs of {len(plays)} scenarios, {virtual_s:,.0f} virtual s in {took_s:,.1f} s:"
        f" {'no rule was broken' if not code else 'see the failures above'}"
    )
    return code


def _until(deadline_s: float) -> Iterator[int]:
    # One batch at least, so that a short time still says something about every scenario.
    return itertools.takewhile(
        lambda seed: seed <= 1 or time.perf_counter() < deadline_s, itertools.count(1)
    )


def _save_failures(play: Scenario, name: str, progress: Progress, out: Path, bar: Bar) -> int:
    from trinamo.sim.own import file_stem

    code = 0
    for kind in progress.failures.values():
        run, finding = kind.first, kind.first.finding
        assert finding is not None
        code = max(code, exit_code_for(finding.invariant))
        lines = [f"{name}, seed {run.seed}, {kind.count} of {progress.runs} runs"]
        lines += [*finding_lines(finding), *hint_lines(run.hints)]
        if exit_code_for(finding.invariant) != EXIT_UNSTEADY:
            path = out / f"{file_stem(play)}-{run.seed}.json"
            save_played(play, run, path)
            lines.append(f"  trinamo sim replay {path}")
        bar.stop()
        say(*lines)
        bar.start()
    return code


def make_dull(recorded: Failure, target: Path, seconds: float) -> int:
    """Shrink, save, and say what is left; the exit code."""
    from trinamo.sim.explore import shrink

    def count(shrunk: Shrunk) -> str:
        faults = shrunk.scenario.parameters.get("faults")
        left = f"{len(faults)} faults, " if isinstance(faults, list) else ""
        return f"{left}{shrunk.run.deviation_count} decisions that are not the default"

    with quietly(), _bar(None) as (bar, task):
        bar.update(task, description="shrinking")

        def show(shrunk: Shrunk) -> None:
            bar.update(task, completed=shrunk.attempts, said=count(shrunk))

        try:
            shrunk = shrink(
                recorded.scenario, recorded.choices(), cpu_s_max=seconds, on_progress=show
            )
        except ValueError as error:
            refuse(str(error))
    save_played(shrunk.scenario, shrunk.run, target)
    end = "nothing gets duller" if shrunk.is_finished else "the time was up"
    say(f"{count(shrunk)} are left after {shrunk.attempts} attempts; {end}.")
    non_default = [(number, each) for number, each in enumerate(shrunk.record) if each.value]
    for number, choice in non_default[:LISTED_MAX]:
        say(f"  decision {number}: {choice.label} = {choice.value} of {choice.n}")
    say(*finding_lines(shrunk.run.finding), f"trinamo sim replay {target}")
    return 0


def explore_all(
    play: Scenario,
    max_dev: int,
    runs_max: int,
    save: Path | None,
    *,
    labels: Sequence[str],
    without: Sequence[str],
) -> int:
    """Bounded exploration of one scenario; the exit code."""
    from trinamo.sim.explore import explore_bounded
    from trinamo.sim.own import label_of

    shown_s = 0.0
    with quietly(), _bar(None) as (bar, task):
        bar.update(task, description=label_of(play))

        def show(found: Search) -> None:
            nonlocal shown_s
            if found.runs == 1:
                bar.update(task, total=min(found.expected_runs, runs_max))
                bar.stop()
                say(f"About {found.expected_runs:,} runs; at most {runs_max:,} are played.")
                bar.start()
            if time.perf_counter() - shown_s > EXPLORE_SECONDS_A_LINE:
                shown_s = time.perf_counter()
                said = f"{len(found.runs_by_deviations) - 1} deviations"
                bar.update(task, completed=found.runs, said=said)

        found = explore_bounded(
            play,
            max_deviations=max_dev,
            runs_max=runs_max,
            labels=tuple(labels),
            without=tuple(without),
            on_progress=show,
        )
    for deviations, runs in enumerate(found.runs_by_deviations):
        say(f"{runs:8d} runs with {deviations} decisions that are not the default")
    if found.is_complete:
        say(f"Complete: there is no other run with at most {max_dev} such decisions.")
        say(f"Not varied: {', '.join(sorted(found.fixed)) or 'nothing'}.")
    else:
        say(f"Not complete: given up after {found.runs} runs (--runs-max).")
    if found.first is None:
        say("No rule was broken.")
        return 0
    say(f"{found.failed_runs} runs broke a rule, the first of them run {found.first_after_runs}.")
    finding = found.first.finding
    assert finding is not None
    say(*finding_lines(finding))
    if save is not None:
        save_played(play, found.first, save)
        say(f"trinamo sim replay {save}")
    return exit_code_for(finding.invariant)


def compare_digests(plays: Sequence[Scenario], seeds: range, pythons: Sequence[str]) -> int:
    """How many scenarios are not functions of their seed."""
    from trinamo.sim.explore import check_determinism
    from trinamo.sim.own import label_of

    unsteady = 0
    with _bar(len(plays)) as (bar, task):
        for play in plays:
            bar.update(task, description=label_of(play))
            try:
                with _children_unheard(2):
                    found = check_determinism(play, list(seeds), pythons=(sys.executable, *pythons))
            except (subprocess.SubprocessError, OSError) as error:
                refuse(f"{label_of(play)} cannot be played elsewhere: {error}", EXIT_BROKEN)
            bar.advance(task)
            if found.differences:
                unsteady += 1
                say(f"{label_of(play)}: NOT deterministic")
                say(*(f"  {difference}" for difference in found.differences), UNSTEADY)
            else:
                say(f"{label_of(play)}: {found.runs} runs of {len(seeds)} seeds agree")
    return unsteady


def compare_with_kernel(play: Scenario, seed: int, seeds: range, timeout_s: float) -> int:
    """Play for real, compare, say what was found; the exit code."""
    import trio

    from trinamo.sim.conformance.compare import conform, refusals
    from trinamo.sim.scenario.file import parse_scenario

    scenario = parse_scenario(play.parameters["text"], play.parameters["where"])
    if why := refusals(scenario):
        refuse(f"{scenario.name} cannot be played on loopback: {'; '.join(why)}")
    with quietly():
        try:
            found = conform(scenario, seed=seed, seeds=seeds, timeout_s=timeout_s)
        except trio.TooSlowError:
            refuse(f"{scenario.name} took more than {timeout_s:g} real s (--timeout)", EXIT_BROKEN)
    how = "every note equal" if found.is_exact else "runs of tokens counted as one"
    say(f"{scenario.name}, seed {seed}, on loopback sockets in real time: {how}, times aside")
    say(f"  {found.same} of {found.requests} requests as in the simulated run of this seed")
    if found.elsewhere:
        say(f"  {found.elsewhere} as in another simulated run")
    say(*(f"  the note {kind} is expected and did not occur" for kind in found.missing))
    for strange in found.strange[:STRANGE_MAX]:
        pairs = list(zip_longest(strange.real, strange.simulated))
        first = next((n for n, (real, fake) in enumerate(pairs) if real != fake), 0)
        say(f"  {strange.request} at its {strange.role}, from note {first} on:")
        for entries in pairs[max(0, first - 1) : first + CONTEXT]:
            real, fake = (
                " ".join([each[0], *(f"{name}={value}" for name, value in each[1])])
                if each
                else "-"
                for each in entries
            )
            say(f"    kernel {real:<60} simulator {fake}")
    say("Conforms." if found.conforms else "Does NOT conform: no simulated run shows this.")
    return 0 if found.conforms else EXIT_BROKEN


def catalogue_table() -> None:
    """Print what ships."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "covers", "about", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in catalogue_names():
        # Not by `load_scenario`: to play one takes the extra `sim`, to read of them nothing.
        told = tomllib.loads(resolve(name).read_text("utf-8"))
        table.add_row(name, ", ".join(told.get("covers", ())), told["about"])
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)
