"""A time line as one HTML file that needs no other: an SVG, and the same in a table."""

from __future__ import annotations

import html
from datetime import UTC, datetime
from typing import Final

from .timeline import TimeLine, TimelineRow, facts_of

_WIDTH: Final = 1000
_LABEL: Final = 230
_ROW: Final = 26
_TOP: Final = 34
_TICKS: Final = 5
_COLOURS: Final = {
    "http": "#4c78a8",
    "attempt": "#72b7b2",
    "worker": "#54a24b",
    "engine": "#eeca3b",
    "queue": "#b279a2",
    "prefill": "#f58518",
    "transfer": "#e45756",
    "reservation": "#9d755d",
}
_OTHER: Final = "#7f8b99"

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>request {title}</title>
<style>
 body {{ font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1080px; color: #1c2733;
   background: #fff; padding: 0 1em; }}
 h1 {{ font-size: 1.2em; overflow-wrap: anywhere; }}
 svg {{ width: 100%; height: auto; }} svg text {{ font: 12px system-ui, sans-serif; fill: #1c2733; }}
 table {{ border-collapse: collapse; width: 100%; }}
 td, th {{ text-align: left; padding: .25em .6em; border-bottom: 1px solid #dde3ea; vertical-align: top; }}
 td.n {{ text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }}
 tr.bad td {{ color: #b3261e; }}
</style></head><body>
<h1>request {title}</h1>
<p>{summary}</p>
{picture}
<table><tr><th>process</th><th>leg</th><th>start, ms</th><th>took, ms</th><th>reached</th><th>known</th></tr>
{rows}
</table>
</body></html>
"""


def timeline_page(line: TimeLine) -> str:
    """The page. Whatever others may have written is escaped."""
    began = datetime.fromtimestamp(line.began, UTC).isoformat(timespec="milliseconds")
    return _PAGE.format(
        title=html.escape(line.request_id),
        summary=html.escape(
            f"began at {began}; {line.duration_s * 1e3:.2f} ms over {len(line.rows)} legs"
        ),
        picture=_picture(line),
        rows="\n".join(_table_row(row) for row in line.rows),
    )


def _picture(line: TimeLine) -> str:
    height = _TOP + _ROW * len(line.rows) + 8
    scale = (_WIDTH - _LABEL - 10) / line.duration_s if line.duration_s > 0 else 0.0
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="legs on a time line">']
    for tick in range(_TICKS + 1):
        at = line.duration_s * tick / _TICKS
        x = _LABEL + at * scale
        parts.append(
            f'<line x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{height}" stroke="#dde3ea"/>'
            f'<text x="{x:.1f}" y="16" text-anchor="middle">{at * 1e3:.4g} ms</text>'
        )
    for number, row in enumerate(line.rows):
        parts.append(_bar(row, _TOP + number * _ROW, scale))
    return "\n".join([*parts, "</svg>"])


def _bar(row: TimelineRow, top: float, scale: float) -> str:
    x, width = _LABEL + row.start_s * scale, max((row.end_s - row.start_s) * scale, 1.5)
    label = html.escape(f"{row.process} · {row.name}"[:40])
    colour = _COLOURS.get(row.name, _OTHER)
    outline = "" if row.is_good else ' stroke="#b3261e" stroke-width="2"'
    dash = ' fill-opacity="0.5"' if row.is_open else ""
    tip = html.escape(facts_of(row))
    parts = [
        f'<text x="0" y="{top + 16:.1f}">{label}</text>',
        (
            f'<rect x="{x:.1f}" y="{top + 3:.1f}" width="{width:.1f}" height="{_ROW - 8}" rx="3"'
            f' fill="{colour}"{outline}{dash}><title>{tip}</title></rect>'
        ),
    ]
    for name, at in row.marks:
        place = _LABEL + at * scale
        parts.append(
            f'<line x1="{place:.1f}" y1="{top:.1f}" x2="{place:.1f}" y2="{top + _ROW - 2:.1f}"'
            f' stroke="#1c2733" stroke-width="1.5"><title>{html.escape(name)}</title></line>'
        )
    return "\n".join(parts)


def _table_row(row: TimelineRow) -> str:
    marks = ", ".join(f"{name} +{(at - row.start_s) * 1e3:.2f}" for name, at in row.marks)
    cells = [html.escape(text) for text in (row.process, row.name, marks, facts_of(row))]
    times = [f"{row.start_s * 1e3:.2f}", f"{(row.end_s - row.start_s) * 1e3:.2f}"]
    bad = "" if row.is_good else ' class="bad"'
    return (
        f"<tr{bad}><td>{cells[0]}</td><td>{cells[1]}</td>"
        f'<td class="n">{times[0]}</td><td class="n">{times[1]}</td>'
        f"<td>{cells[2]}</td><td>{cells[3]}</td></tr>"
    )
