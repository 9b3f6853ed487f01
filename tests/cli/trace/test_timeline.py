"""The time line of a request: which one is drawn, and how, for a terminal and as a page."""

from __future__ import annotations

import json
import re

from rich.console import Console

from trinamo.cli.status.asking import ProcessAnswers
from trinamo.cli.trace.page import timeline_page
from trinamo.cli.trace.text import timeline_text
from trinamo.cli.trace.timeline import TimeLine, time_line, timeline_json
from trinamo.runtime.traces.ring import LegView, TraceView


def leg(name: str, start: float, end: float | None, **facts: str | int) -> LegView:
    return LegView(name=name, start=start, end=end, facts={"outcome": "success", **facts})


def found(process: str, request_id: str, *legs: LegView) -> tuple[str, TraceView]:
    return process, TraceView(request_id=request_id, legs=list(legs))


OLD, NEW = "mine-0000000000000001", "mine-0000000000000002"
ANSWERS = ProcessAnswers(
    found=[
        found("frontend", OLD, leg("http", 90.0, 91.0)),
        found("worker-1", f"{NEW}.0011aabb", leg("worker", 100.3, 100.9, endpoint="a/b/c")),
        found(
            "frontend",
            NEW,
            LegView(name="http", start=100.0, end=101.0, marks=[("first_token", 100.5)]),
            leg("attempt", 100.1, 100.2, instance="7", outcome="disconnected"),
            leg("attempt", 100.2, None, instance="8"),
        ),
        found("worker-2", f"{NEW}.00000001"),
    ],
    asked=3,
    keeping=3,
)


def line() -> TimeLine:
    drawn = time_line(ANSWERS)
    assert drawn is not None
    return drawn


def printed(drawn: TimeLine, width: int = 140) -> str:
    console = Console(width=width, highlight=False, markup=False, color_system=None)
    with console.capture() as capture:
        for part in timeline_text(drawn, width):
            console.print(part)
    return capture.get()


def test_the_newest_request_is_drawn_and_the_others_are_named() -> None:
    drawn = line()
    assert (drawn.request_id, drawn.older) == (NEW, (OLD,))
    assert [(row.process, row.name) for row in drawn.rows] == [
        ("frontend", "http"),
        ("frontend", "attempt"),
        ("frontend", "attempt"),
        ("worker-1", "worker"),
    ]
    assert round(drawn.duration_s, 6) == 1.0


def test_a_leg_under_way_is_drawn_as_far_as_anything_is_known() -> None:
    row = line().rows[2]
    assert row.is_open
    assert round(row.end_s, 6) == 1.0


def test_bars_stand_where_their_legs_are() -> None:
    rows = [text for text in printed(line()).splitlines() if "█" in text]
    starts = [text.index("█") for text in rows]
    assert starts == sorted(starts)
    assert starts[3] > starts[2] > starts[0]
    lengths = [len(re.findall("[█F]", text.split("   ", 4)[-1])) for text in rows]
    assert lengths[0] > lengths[3] > lengths[1]


def test_a_failed_attempt_says_its_error_first() -> None:
    assert "disconnected, instance 7" in printed(line())


def test_what_others_wrote_does_no_harm() -> None:
    answers = ProcessAnswers(
        found=[found("w\x1b[2J<b>", "r", leg("http", 1.0, 2.0, model="<script>\x07"))]
    )
    drawn = time_line(answers)
    assert drawn is not None
    assert "\x1b" not in printed(drawn)
    page = timeline_page(drawn)
    assert "<script>" not in page
    assert "<b>" not in page


def test_the_page_needs_no_other_file() -> None:
    page = timeline_page(line())
    assert page.startswith("<!doctype html>")
    assert page.count("<rect") == 4
    assert not re.search(r"(src|href)=|https?://|@import", page)


def test_a_request_of_no_duration_can_be_drawn() -> None:
    drawn = time_line(ProcessAnswers(found=[found("w", "r", leg("http", 1.0, 1.0))]))
    assert drawn is not None
    assert "http" in printed(drawn)
    assert "<rect" in timeline_page(drawn)


def test_nothing_found_is_nothing_to_draw() -> None:
    nothing = ProcessAnswers(asked=2, keeping=2, away=["worker-1 does not answer"])
    assert time_line(nothing) is None
    assert json.loads(timeline_json(None, nothing)) == {
        "request": None,
        "asked": 2,
        "away": ["worker-1 does not answer"],
        "found": [],
    }


def test_programs_get_every_leg() -> None:
    told = json.loads(timeline_json(line(), ANSWERS))
    assert len(told["request"]["rows"]) == 4
    assert len(told["found"]) == 4
