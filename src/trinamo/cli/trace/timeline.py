"""The legs that several processes told of one request, on one axis: what both pictures draw."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import attrs
import msgspec

from trinamo.runtime.traces.ring import LegView, root_of
from trinamo.runtime.traces.trace import Fact

from ..status.asking import Answers, Found

ROWS_MAX: Final = 500


@attrs.frozen
class Row:
    """One leg. Times are seconds since the request's first leg began."""

    process: str
    name: str
    start_s: float
    end_s: float
    is_open: bool
    """It had not ended when it was told; `end_s` is as far as anything is known."""
    marks: tuple[tuple[str, float], ...]
    facts: dict[str, Fact]

    @property
    def is_good(self) -> bool:
        """Whether it ended as it should, or has not ended."""
        return self.facts.get("outcome", "success") in ("success", "adopted")


@attrs.frozen
class TimeLine:
    """One request, its rows in the order in which they began."""

    request_id: str
    began: float
    """Seconds since the Unix epoch."""
    duration_s: float
    rows: tuple[Row, ...]
    older: tuple[str, ...]
    """Other requests that the id also fits, which are not shown; ids inside the cluster."""


def time_line(answers: Answers) -> TimeLine | None:
    """The newest request among what was found; None if nothing was.

    A client may have given several requests the same id: inside the cluster theirs differ.
    """
    requests: dict[str, list[Found]] = {}
    for each in answers.found:
        if each.trace.legs:
            requests.setdefault(root_of(each.trace.request_id), []).append(each)
    if not requests:
        return None
    ordered = sorted(requests, key=lambda root: _began(requests[root]))
    newest = requests[ordered[-1]]
    began = _began(newest)
    known = max(_last(leg) for each in newest for leg in each.trace.legs)
    rows = [_row(each.process, leg, began, known) for each in newest for leg in each.trace.legs]
    rows.sort(key=lambda row: (row.start_s, -row.end_s))
    return TimeLine(
        request_id=ordered[-1],
        began=began,
        duration_s=known - began,
        rows=tuple(rows[:ROWS_MAX]),
        older=tuple(ordered[:-1]),
    )


def _began(found: Sequence[Found]) -> float:
    return min(leg.start for each in found for leg in each.trace.legs)


def _last(leg: LegView) -> float:
    return max(leg.start, leg.end or 0.0, *(at for _, at in leg.marks), leg.start)


def _row(process: str, leg: LegView, began: float, known: float) -> Row:
    return Row(
        process=process,
        name=leg.name,
        start_s=leg.start - began,
        end_s=(known if leg.end is None else leg.end) - began,
        is_open=leg.end is None,
        marks=tuple((name, at - began) for name, at in leg.marks),
        facts=leg.facts,
    )


def facts_of(row: Row) -> str:
    """What is known of a leg, in a line; an outcome that is no success comes first."""
    told = [] if row.is_good else [str(row.facts["outcome"])]
    if row.is_open:
        told.append("under way")
    for name, value in row.facts.items():
        if name != "outcome" and value != "":
            told.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(told)


def timeline_json(line: TimeLine | None, answers: Answers) -> str:
    """All that was found, as one JSON object."""
    told = {
        "request": None if line is None else attrs.asdict(line),
        "asked": answers.asked,
        "away": answers.away,
        "found": [
            {"process": each.process, "trace": msgspec.to_builtins(each.trace)}
            for each in answers.found
        ],
    }
    return json.dumps(told, indent=2)
