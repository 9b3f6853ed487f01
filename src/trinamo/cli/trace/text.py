"""A time line in the terminal: a row for each leg, a bar for its time, a letter for each mark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from trinamo.runtime.logs.text import one_line

from .timeline import TimeLine, TimelineRow, facts_of

CELL_CHARACTERS_MAX: Final = 200
_BAR_CHARACTERS: Final = (20, 60)
_LABELS_CHARACTERS: Final = 84
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"


def timeline_text(line: TimeLine, width: int) -> Iterator[RenderableType]:
    """The parts to print, in order, for a terminal of `width` characters."""
    yield Text(
        one_line(f"request {line.request_id}: {_time(line.duration_s)}, {len(line.rows)} legs")
    )
    least, most = _BAR_CHARACTERS
    bar = max(least, min(most, width - _LABELS_CHARACTERS))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    table.add_column("process", no_wrap=True)
    table.add_column("leg", no_wrap=True)
    table.add_column("start", justify="right", no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    end = _time(line.duration_s)
    axis = "0" + " " * max(1, bar - 1 - len(end)) + end
    table.add_column(axis, no_wrap=True, min_width=bar)
    table.add_column("what is known", overflow="fold")
    for row in line.rows:
        marks = [f"{name.replace('_', ' ')} +{_time(at - row.start_s)}" for name, at in row.marks]
        known = "; ".join(part for part in (", ".join(marks), facts_of(row)) if part)
        table.add_row(
            Text(one_line(row.process, characters_max=28)),
            Text(one_line(row.name, characters_max=20)),
            _time(row.start_s),
            f"{_time(row.end_s - row.start_s)}{'…' if row.is_open else ''}",
            _bar(row, line.duration_s, bar),
            Text(one_line(known, characters_max=CELL_CHARACTERS_MAX)),
        )
    yield table
    if line.older:
        others = ", ".join(line.older[-4:])
        yield Text(
            one_line(f"the id fits {len(line.older)} older requests too: {others}"), style="dim"
        )


def _bar(row: TimelineRow, duration_s: float, width: int) -> Text:
    scale = width / duration_s if duration_s > 0 else 0.0
    start = min(width - 1, int(row.start_s * scale))
    length = max(row.end_s - row.start_s, 0.0) * scale
    whole, eighths = int(length), _EIGHTHS[int(length % 1 * 8)]
    cells = [*" " * start, *"█" * min(whole, width - start)]
    if len(cells) < width and (eighths != " " or not whole):
        cells.append(eighths if eighths != " " else _EIGHTHS[1])
    cells += " " * (width - len(cells))
    bar = Text("".join(cells), style="cyan" if row.is_good else "red")
    for name, at in row.marks:
        place = min(width - 1, max(0, int(at * scale)))
        # A letter on the bar: which mark it is, the last column says.
        bar = bar[:place] + Text(name[:1].upper(), style="bold reverse") + bar[place + 1 :]
    return bar


def _time(seconds: float) -> str:
    if abs(seconds) < 0.0995:
        return f"{seconds * 1e3:.2f} ms" if abs(seconds) < 0.00995 else f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e3:.0f} ms" if abs(seconds) < 9.995 else f"{seconds:.1f} s"
