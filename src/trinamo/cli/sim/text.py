"""What the simulator's commands print."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trinamo.sim.core.trace import Row
    from trinamo.sim.explore import Finding, Pin, Run, Scenario


BAR_WIDTH = 40
EVIDENCE_LINES_MAX = 30


def say(*lines: str) -> None:
    """One line, or more, on standard output."""
    sys.stdout.writelines(f"{line}\n" for line in lines)


def quietly() -> AbstractContextManager[None]:
    """Without the log of the simulated processes: their story is in the trace."""
    from trinamo.sim.explore import quietly as silence

    return silence()


def title_of(play: Scenario, seed: int) -> str:
    """What a run is called."""
    from trinamo.sim.own import label_of

    bug = play.parameters.get("bug")
    return f"{label_of(play)}, seed {seed}" + (f", with {bug} planted" if bug else "")


def finding_lines(finding: Finding | None) -> list[str]:
    """The verdict, and the first lines of what was seen."""
    if finding is None:
        return ["No rule was broken."]
    lines = finding.text.splitlines() or [""]
    more = len(lines) - EVIDENCE_LINES_MAX
    return [
        f"{finding.invariant} broken: {lines[0]}",
        *(f"  {line}" for line in lines[1:EVIDENCE_LINES_MAX]),
        *([f"  … {more} more lines"] if more > 0 else []),
    ]


def run_lines(title: str, run: Run, cpu_s: float) -> list[str]:
    """A run in a few lines."""
    speed = f", {run.virtual_s / cpu_s:,.0f} x real time" if cpu_s > 0 else ""
    return [
        title,
        f"  {run.virtual_s:.3f} virtual s in {cpu_s:.2f} s of processor time{speed}",
        f"  {run.steps} steps, {run.events} events, {run.rows} rows",
        f"  {len(run.values)} decisions, {run.deviation_count} of them not the default",
        f"  digest {run.digest}",
        *finding_lines(run.finding),
        *(f"Not tested by this run: {text}." for text in run.untested),
    ]


def hints_for(play: Scenario, run: Run) -> list[str]:
    """What looks like a mistake of who wrote the scenario, judging by one run and by its file."""
    from trinamo.sim.explore.hints import nothing_varies
    from trinamo.sim.own import standing_hints

    if run.finding is not None:
        return [*run.hints]
    # One run says little about what may vary between many; none at all is a mistake.
    still = [] if run.varying else [nothing_varies(())]
    return [*run.hints, *still, *standing_hints(play, run)]


def hint_lines(hints: Iterable[str]) -> list[str]:
    """Hints as lines."""
    return [f"Hint: {text}." for text in hints]


def is_under_pct(play: Scenario) -> bool:
    """Whether the policy `pct` was asked for, or is the scenario file's own."""
    text = str(play.parameters.get("text", ""))
    return play.parameters.get("policy") == "pct" or 'policy = "pct"' in text


def promise_line(runs: int, steps: int) -> str:
    """How many of `runs` seeds `pct` is sure to find a bug in, by its depth; of runs of so many steps."""
    from trinamo.sim.core.policies import pct_chance

    sure = [runs * pct_chance(tasks=1, steps=steps, depth=depth) for depth in (1, 2, 3)]
    return (
        f"pct shows a bug of depth 1, 2 or 3 in at least {sure[0]:.1f}, {sure[1]:.2g} or {sure[2]:.2g}"
        f" of {runs} seeds of {steps} steps, divided by the number of tasks"
    )


def pin_lines(pin: Pin) -> list[str]:
    """The share of failing endings over virtual time, as bars."""
    lines = ["virtual s  decisions kept  endings that fail"]
    for point in pin.points:
        bar = "█" * round(point.ratio * BAR_WIDTH)
        mark = "  <- inevitable from here on" if point is pin.inevitable else ""
        share = f"{point.failed}/{point.runs}"
        lines.append(f"{point.time_s:9.4f}  {point.prefix:14d}  {share:>7} {bar}{mark}")
    if pin.inevitable is None:
        lines.append("Even the whole run's decisions do not make the failure certain.")
    return lines


def row_text(row: Row) -> str:
    """One row, for people."""
    fields = " ".join(f"{name}={value!s}" for name, value in row.fields)
    return f"{row.time_s:12.6f}  {row.host:<14} {row.kind:<16} {fields}"
