"""What is held back of many lines of a kind, and that it is told."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trinamo.runtime.logs.setup import ALL_BURST_LINES, BURST_LINES, KINDS_MAX, FloodGate


def line(sentence: str, at_s: float, *, level: int = logging.WARNING) -> logging.LogRecord:
    record = logging.LogRecord("x", level, __file__, 0, sentence, ("detail",), None)
    record.created = at_s
    return record


def told(records: Sequence[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in records]


def flood(gate: FloodGate, count: int, at_s: float, *, level: int = logging.WARNING) -> int:
    return sum(len(gate.admit(line("refused: %s", at_s, level=level))) for _ in range(count))


def test_a_flood_is_a_burst_and_the_next_line_tells_how_many_more() -> None:
    gate = FloodGate()

    assert flood(gate, 8000, 100.0) == BURST_LINES
    [later] = gate.admit(line("refused: %s", 101.0))

    assert vars(later)["held_back"] == 8000 - BURST_LINES
    assert gate.held_back == 8000 - BURST_LINES


def test_another_kind_is_not_held_back_by_a_flood() -> None:
    gate = FloodGate()
    flood(gate, 1000, 100.0)

    assert told(gate.admit(line("lease lost: %s", 100.0))) == ["lease lost: detail"]


def test_a_flood_that_has_ended_is_told_with_a_line_of_another_kind() -> None:
    gate = FloodGate()
    flood(gate, BURST_LINES + 7, 100.0)

    first, last = told(gate.admit(line("lease lost: %s", 200.0)))

    assert first == "7 lines like this were held back: refused: %s"
    assert last == "lease lost: detail"
    assert told(gate.tell_all()) == []


def test_what_was_held_back_is_told_at_the_end() -> None:
    gate = FloodGate()
    flood(gate, BURST_LINES + 1, 100.0)

    assert told(gate.tell_all()) == ["1 lines like this were held back: refused: %s"]


def test_lines_for_debugging_are_all_written() -> None:
    assert flood(FloodGate(), 5000, 100.0, level=logging.DEBUG) == 5000


def test_kinds_without_number_are_bounded_in_lines_and_in_memory() -> None:
    """A sentence with a peer's text in it would be a new kind each time."""
    gate = FloodGate()

    written = [gate.admit(line(f"refused {n}: %s", 100.0)) for n in range(5000)]

    assert sum(map(len, written)) == ALL_BURST_LINES
    assert len(gate._kinds) == KINDS_MAX


def test_a_clock_that_is_set_back_does_not_close_the_gate() -> None:
    gate = FloodGate()
    flood(gate, 1000, 5000.0)

    assert flood(gate, 10, 100.0) == 0
    assert flood(gate, 10, 105.0) == 10


def test_tracebacks_are_dearer_than_lines() -> None:
    gate = FloodGate()
    written = 0
    for _ in range(100):
        record = line("cannot accept: %s", 100.0)
        record.exc_info = (OSError, OSError(24, "too many"), None)
        written += len(gate.admit(record))

    assert written == 5
