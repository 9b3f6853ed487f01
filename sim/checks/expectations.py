"""What the scenario itself expects: allowed ends, enough whole answers, and that it happened."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from ..cluster.workload import COMPLETE

if TYPE_CHECKING:
    from ..cluster.outcome import Outcome


BURST_S: Final = 0.02


def check(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """What the file asks for and the run did not show."""
    for text in (
        *_wrong_ends(outcome), *_wrong_notes(outcome), *_bursts(outcome), *_wrong_answers(outcome)
    ):  # fmt: skip
        yield "expected", text


def _wrong_ends(outcome: Outcome) -> Iterator[str]:
    expect = outcome.scenario.expect
    for record in outcome.cluster.records:
        for terminal in record.terminals:
            if expect.outcomes and not any(fnmatchcase(terminal, o) for o in expect.outcomes):
                yield f"{record.name} ended with {terminal!r}"
    complete = sum(record.outcome == COMPLETE for record in outcome.cluster.records)
    if complete < expect.complete_min:
        yield f"{complete} requests were answered whole, not {expect.complete_min}"


def _wrong_notes(outcome: Outcome) -> Iterator[str]:
    seen = {row.kind for row in outcome.told}
    for kind in outcome.scenario.expect.notes:
        if kind not in seen and not outcome.violations:
            # One run may lack it by chance; if no run of a swarm shows it, that is a finding.
            outcome.world.missed.append(f"there is no note {kind!r}")
    # Once all is settled everybody is told to leave, and is forgotten and lost in good order.
    before = {row.kind for row in takewhile(lambda row: row.kind != "settled", outcome.told)}
    for kind in outcome.scenario.expect.never:
        if kind in before:
            yield f"there is a note {kind!r}"


def _wrong_answers(outcome: Outcome) -> Iterator[str]:
    for row in outcome.world.trace.of_kind("byzantine.end"):
        answer, expects = row.field("answer"), row.field("expects")
        if answer != expects:
            act = row.field("act")
            yield f"the Byzantine client's {act} was answered with {answer!r}, not {expects!r}"


def _bursts(outcome: Outcome) -> Iterator[str]:
    expect, trace = outcome.scenario.expect, outcome.world.trace
    over = trace.of_kind("fault.over")
    if not expect.burst_note or not over:
        return
    times_s = [r.time_s for r in trace.of_kind(expect.burst_note) if r.time_s >= over[0].time_s]
    for number, first_s in enumerate(times_s):
        together = sum(first_s <= time_s <= first_s + BURST_S for time_s in times_s[number:])
        if together > expect.burst_max:
            yield f"{together} notes {expect.burst_note!r} within {BURST_S:g} s"
            return
