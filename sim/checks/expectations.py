"""What the scenario itself expects: allowed ends, enough whole answers, and that it happened."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from ..load import COMPLETE

if TYPE_CHECKING:
    from ..scenario import Outcome

__all__ = ["BURST_S", "check"]

BURST_S: Final = 0.02


def check(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """What the file asks for and the run did not show."""
    expect = outcome.scenario.expect
    for record in outcome.cluster.records:
        for terminal in record.terminals:
            if expect.outcomes and not any(fnmatchcase(terminal, o) for o in expect.outcomes):
                yield "expected", f"{record.name} ended with {terminal!r}"
    complete = sum(record.outcome == COMPLETE for record in outcome.cluster.records)
    if complete < expect.complete_min:
        yield "expected", f"{complete} requests were answered whole, not {expect.complete_min}"
    seen = {row.kind for row in outcome.world.trace.rows}
    for kind in expect.notes:
        if kind not in seen:
            yield "expected", f"there is no note {kind!r}: nothing was tested"
    for kind in expect.never:
        if kind in seen:
            yield "expected", f"there is a note {kind!r}"
    yield from _check_burst(outcome)
    for row in outcome.world.trace.of_kind("rogue.end"):
        if row.field("answer") != row.field("expects"):
            yield (
                "expected",
                f"the rogue's {row.field('act')} was answered with {row.field('answer')!r}, not"
                f" {row.field('expects')!r}",
            )


def _check_burst(outcome: Outcome) -> Iterator[tuple[str, str]]:
    expect, trace = outcome.scenario.expect, outcome.world.trace
    over = trace.of_kind("fault.over")
    if not expect.burst_note or not over:
        return
    times_s = [r.time_s for r in trace.of_kind(expect.burst_note) if r.time_s >= over[0].time_s]
    for number, first_s in enumerate(times_s):
        together = sum(first_s <= time_s <= first_s + BURST_S for time_s in times_s[number:])
        if together > expect.burst_max:
            yield "expected", f"{together} notes {expect.burst_note!r} within {BURST_S:g} s"
            return
