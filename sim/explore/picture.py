"""The page of one run: what `sim/report` draws, with the run's own facts beside it."""

from __future__ import annotations

from .run import Played


def page_of(
    title: str,
    played: Played,
    *,
    until_s: float | None = None,
) -> str:
    """The HTML page of a run, up to `until_s` virtual seconds if given; see `sim.report.page`."""
    from ..report import About, page  # noqa: PLC0415 -- most runs are never drawn

    run, rows = played.run, played.trace.rows
    is_whole = until_s is None or until_s >= run.virtual_s
    end_s = run.virtual_s if until_s is None else min(until_s, run.virtual_s)
    if not is_whole:
        rows = [row for row in rows if row.time_s <= end_s]
        title = f"{title}, until {end_s:g} s"
    finding = run.finding if is_whole else None
    about = About(
        title=title,
        invariant=finding.invariant if finding else "",
        text=finding.text if finding else "",
        at_s=finding.at_s if finding else 0.0,
        end_s=end_s,
        facts=(
            ("seed", str(run.seed)),
            ("digest", run.digest),
            ("decisions", f"{len(run.values)}, {run.deviation_count} not the default"),
        ),
    )
    return page(rows, about)
