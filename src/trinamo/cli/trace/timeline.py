"""The legs that several processes told of one request, on one axis: what both pictures draw."""

from __future__ import annotations

import json
from typing import Final

import attrs
import msgspec

from trinamo.runtime.traces.trace import Fact
from trinamo.runtime.view.requests import legs_by_request

from ..status.asking import ProcessAnswers

ROWS_MAX: Final = 500


@attrs.frozen
class TimelineRow:
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
    rows: tuple[TimelineRow, ...]
    older: tuple[str, ...]
    """Other requests that the id also fits, which are not shown; ids inside the cluster."""


def time_line(answers: ProcessAnswers) -> TimeLine | None:
    """The newest request among what was found; None if nothing was."""
    requests = legs_by_request(answers.found)
    if not requests:
        return None
    newest, found = requests[-1]
    legs = [(each.process, each.leg) for each in found]
    began = legs[0][1].start
    known = max(
        max(leg.start, leg.end or 0.0, *(at for _, at in leg.marks), 0.0) for _, leg in legs
    )
    rows = [
        TimelineRow(
            process=process,
            name=leg.name,
            start_s=leg.start - began,
            end_s=(known if leg.end is None else leg.end) - began,
            is_open=leg.end is None,
            marks=tuple((name, at - began) for name, at in leg.marks),
            facts=leg.facts,
        )
        for process, leg in legs
    ]
    rows.sort(key=lambda row: (row.start_s, -row.end_s))
    return TimeLine(
        request_id=newest,
        began=began,
        duration_s=known - began,
        rows=tuple(rows[:ROWS_MAX]),
        older=tuple(each for each, _ in requests[:-1]),
    )


def facts_of(row: TimelineRow) -> str:
    """What is known of a leg, in a line; an outcome that is no success comes first."""
    told = [] if row.is_good else [str(row.facts["outcome"])]
    if row.is_open:
        told.append("under way")
    for name, value in row.facts.items():
        if name != "outcome" and value != "":
            told.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(told)


def timeline_json(line: TimeLine | None, answers: ProcessAnswers) -> str:
    """All that was found, as one JSON object."""
    told = {
        "request": None if line is None else attrs.asdict(line),
        "asked": answers.asked,
        "away": answers.away,
        "found": [
            {"process": name, "trace": msgspec.to_builtins(trace)} for name, trace in answers.found
        ],
    }
    return json.dumps(told, indent=2)
