"""Search for a failure of one's own protocol: swarm, shrink, save, draw, in one call.

What this module does not do: any of it itself. `scenario.py` says what a scenario function is, and
`explore/` does the work.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs
from typing_extensions import override

from ..core.choices import Choice, Choices, ReplayChoices
from ..errors import Violation
from ..explore.failure import Failure, save_failure
from ..explore.run import BadScenario, Played, Run, Scenario, page_of, played, quietly
from ..explore.shrink import shrink as shrink_run
from ..explore.swarm import NONDETERMINISM, Progress, swarm
from .scenario import file_stem, function_in_file, label_of, standing_hints

LISTED_MAX = 12


class Hint(UserWarning):
    """A search found nothing, and may have tested less than it seems; the text says what to change."""


@attrs.frozen(kw_only=True)
class Found:
    """The first failure of a search. `str` of it is what a person wants to read."""

    scenario: str
    """What was searched: `FILE.py::function`, or the function's name."""
    seed: int
    rule: str
    """The invariant that was broken, or `deadlock`, `error KeyError` and the like."""
    violation: Violation
    """The finding of the shrunk run, ready to be raised."""
    decisions: tuple[Choice, ...]
    """The decisions of the shrunk run that are not the default answer."""
    decisions_before: int
    """How many there were before shrinking."""
    runs: int
    """How many seeds were played until it showed."""
    failed_runs: int
    failure: Path | None
    """The file that replays it; None without `out`, or if the function stands in no file."""
    page: Path | None
    """Its picture; None without `out`."""
    replay: str
    """The command, or the call, that plays it again."""
    hints: tuple[str, ...] = ()

    @override
    def __str__(self) -> str:
        before, after = self.decisions_before, len(self.decisions)
        lines = [
            f"{self.rule} broken in {self.scenario}, seed {self.seed}",
            f"  {self.failed_runs} of {self.runs} runs failed",
            *(f"  {line}" for line in self.violation.text.splitlines()[:LISTED_MAX]),
            f"  decisions: {before} that are not the default before shrinking, {after} after",
            *(
                f"    {each.label} = {each.value} of {each.n}"
                for each in self.decisions[:LISTED_MAX]
            ),
        ]
        if after > LISTED_MAX:
            lines.append(f"    … {after - LISTED_MAX} more")
        lines.append(f"  replay: {self.replay}")
        if self.page is not None:
            lines.append(f"  page: {self.page}")
        return "\n".join([*lines, *(f"  hint: {hint}" for hint in self.hints)])


class _Enough(Exception):  # noqa: N818 -- no error: it ends the swarm
    pass


def search(
    run: Callable[..., object] | Scenario,
    *,
    seeds: Iterable[int] = range(200),
    out: Path | None = None,
    shrink: bool = True,
    shrink_cpu_s_max: float = 30.0,
    jobs: int | None = None,
    on_progress: Callable[[Progress], object] = lambda _progress: None,
) -> Found | None:
    """Play these seeds until one fails; make it small, save it and draw it below `out`.

    `run` is a scenario function (of `choices`, `world` or `network`: see `scenario.py`) or a `Scenario`.
    The search ends after the batch of eight seeds in which a failure shows, and returns the one of the
    smallest seed; None if there is none, with a `Hint` warned of for whatever the runs did not test.
    Shrinking takes at most `shrink_cpu_s_max` seconds of processor time. What is found does not depend on
    `jobs`: by default one process for each core when it takes longer than a moment, if the function
    stands at the top of a file and this process can be forked (Linux, and no thread but this), else
    this one. Asked for, they are started anywhere, and read the file for themselves. `on_progress` hears
    after each batch. Raises `BadScenario` for what is no scenario, `Escape` never: it is a finding.
    """
    scenario = run if isinstance(run, Scenario) else function_in_file(run)
    if jobs is None and type(scenario) is not Scenario:
        # Of a subclass it holds what only this process may have.
        jobs = 1
    if jobs != 1 and not scenario.is_filed:
        raise BadScenario("several processes play only a function that stands at the top of a file")
    with quietly():
        progress = _swarm(scenario, seeds, jobs, on_progress)
        if not progress.failures:
            untested = [
                f"{text}, in none of {progress.runs} runs" for text in progress.coverage.untested
            ]
            for text in (*untested, *progress.hints, *standing_hints(scenario, progress)):
                warnings.warn(text, Hint, stacklevel=2)
            return None
        first = min((kind.first for kind in progress.failures.values()), key=lambda run: run.seed)
        return _found(scenario, first, progress, out, shrink_cpu_s_max if shrink else 0.0)


def examine(
    run: Callable[..., object] | Scenario,
    choices: Choices,
    *,
    out: Path | None = None,
    shrink_cpu_s_max: float = 30.0,
) -> Found | None:
    """Play once, with decisions that somebody else drew, such as Hypothesis; what fails as `search` has it.

    Hypothesis is told to leave its shrinking (`settings(phases=…)`): it plays ten times as many runs
    to make less of it, and can save nothing.
    """
    scenario = run if isinstance(run, Scenario) else function_in_file(run)
    with quietly():
        first = played(scenario, choices).run
        if first.finding is None:
            return None
        progress = Progress()
        progress.add(first)
        return _found(scenario, first, progress, out, shrink_cpu_s_max)


def _swarm(
    scenario: Scenario,
    seeds: Iterable[int],
    jobs: int | None,
    on_progress: Callable[[Progress], object],
) -> Progress:
    latest = Progress()

    def show(progress: Progress) -> None:
        nonlocal latest
        latest = progress
        on_progress(progress)
        if progress.failures:
            raise _Enough

    try:
        return swarm(scenario, seeds, jobs=jobs, may_spawn=jobs is not None, on_progress=show)
    except _Enough:
        return latest


def _found(
    scenario: Scenario, first: Run, progress: Progress, out: Path | None, cpu_s_max: float
) -> Found:
    finding, shown, failure, page = first.finding, first, None, None
    decisions: tuple[Choice, ...] = ()
    assert finding is not None
    result = played(scenario, ReplayChoices(first.values, first.seed), to_draw=out is not None)
    again = result.run.finding
    # What cannot be played again cannot be shrunk, and a file would replay something else.
    if finding.invariant != NONDETERMINISM and again is not None and again.key == finding.key:
        if cpu_s_max > 0:
            choices = ReplayChoices(first.values, first.seed)
            small = shrink_run(scenario, choices, cpu_s_max=cpu_s_max)
            scenario = small.scenario
            choices = ReplayChoices(small.run.values, first.seed)
            result = played(scenario, choices, to_draw=out is not None)
        if out is not None:
            failure, page = _save(scenario, result, out)
        shown, decisions = result.run, tuple(each for each in result.record if each.value)
    assert shown.finding is not None
    return Found(
        scenario=label_of(scenario),
        seed=shown.seed,
        rule=shown.finding.invariant,
        violation=Violation(shown.finding.invariant, shown.finding.text),
        decisions=decisions,
        decisions_before=first.deviation_count,
        runs=progress.runs,
        failed_runs=progress.failed_runs,
        failure=failure,
        page=page,
        replay=_again(scenario, first.seed, failure),
        hints=shown.hints,
    )


def _save(scenario: Scenario, result: Played, out: Path) -> tuple[Path | None, Path | None]:
    out.mkdir(parents=True, exist_ok=True)
    stem = f"{file_stem(scenario)}-{result.run.seed}"
    page = out / f"{stem}.html"
    page.write_text(page_of(f"{label_of(scenario)}, seed {result.run.seed}", result), "utf-8")
    if not scenario.is_filed:
        return None, page
    failure = out / f"{stem}.json"
    try:
        save_failure(Failure.of(scenario, result), failure)
    except ValueError:
        # Larger than a failure file may be; the seed replays it as well.
        return None, page
    return failure, page


def _again(scenario: Scenario, seed: int, failure: Path | None) -> str:
    """How to play it again, for who stands in the folder that the search stood in."""
    is_named = "file" in scenario.parameters or "where" in scenario.parameters
    if failure is None and not is_named:
        return f"search(…, seeds=[{seed}])"
    # A failure file may name files below the folder it is replayed in, and no others.
    file = Path(str(scenario.parameters.get("file", "")))
    there = f"cd {shlex.quote(str(file.parent))} && " if file.is_absolute() else ""
    if failure is not None:
        path = failure.resolve() if there else failure
        return f"{there}trinamo sim replay {shlex.quote(str(path))}"
    return f"{there}trinamo sim run {shlex.quote(label_of(scenario))} --seed {seed}"
