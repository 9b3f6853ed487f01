"""What `trinamo bench transfer` measured: a table, bars for a terminal, JSON, and an SVG picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

import attrs

if TYPE_CHECKING:
    from rich.console import Console


_BAR: Final = 40
_COLOURS: Final = {"read": "#2563a8", "write": "#d97a1d"}
_TEXT: Final = "#1f2933"
_FAINT: Final = "#8794a1"


@attrs.frozen
class TransferRow:
    """One backend and direction. Without figures, `problem` says why."""

    backend: str
    direction: str
    gb_per_s: float = 0.0
    best_gb_per_s: float = 0.0
    mover_s_per_gb: float = 0.0
    """CPU seconds; all threads of the process."""
    owner_s_per_gb: float = 0.0
    lag_p99_ms: float = 0.0
    block_us: float = 0.0
    """The median of one transfer of one 4 KB block."""
    is_good: bool = False
    """Whether the bytes of the last transfer of every kind were those that were sent."""
    problem: str = ""


# --- for a terminal ------------------------------------------------------------------------------


def show(rows: Sequence[TransferRow], console: Console, title: str) -> None:
    """The table, and a bar for each row."""
    from rich.table import Table

    table = Table(
        title=title,
        caption="s/GB: CPU seconds per GB · lag: of the mover's event loop · 4 KB: median of one block",
    )
    for name in ("backend", "direction"):
        table.add_column(name, no_wrap=True)
    for name in ("GB/s", "best", "mover s/GB", "owner s/GB", "lag p99 ms", "4 KB us"):
        table.add_column(name, justify="right")
    table.add_column("bytes")
    for row in rows:
        if row.problem:
            table.add_row(row.backend, "", "", "", "", "", "", "", "not here")
        else:
            figures = (row.gb_per_s, row.best_gb_per_s, row.mover_s_per_gb, row.owner_s_per_gb)
            table.add_row(
                row.backend,
                row.direction,
                *(f"{each:.2f}" for each in figures),
                f"{row.lag_p99_ms:.1f}",
                f"{row.block_us:.0f}",
                "verified" if row.is_good else "WRONG",
            )
    console.print(table)
    longest = max((row.gb_per_s for row in rows), default=0.0) or 1.0
    for row in rows:
        if not row.problem:
            bar = "█" * max(1, round(_BAR * row.gb_per_s / longest))
            console.print(f"{row.backend:>14} {row.direction:<5} {bar} {row.gb_per_s:.2f}")
    for row in rows:
        if row.problem:
            console.print(f"{row.backend} is not here: {row.problem}", markup=False, soft_wrap=True)


# --- for programs --------------------------------------------------------------------------------


def rows_json(rows: Sequence[TransferRow], **settings: Any) -> str:
    """One object: what was asked for, and `rows`."""
    return json.dumps({**settings, "rows": [attrs.asdict(row) for row in rows]}, indent=2) + "\n"


# --- as a picture --------------------------------------------------------------------------------


@attrs.frozen
class _Panel:
    """One row of bars: a figure of every measured row."""

    title: str
    values: Sequence[tuple[float, float]]
    """For each row the whole bar, and the part of it that is drawn in full colour."""
    left: float
    width: float

    def draw(
        self, rows: Sequence[TransferRow], places: Sequence[float], height: float
    ) -> list[str]:
        longest = max((whole for whole, _ in self.values), default=0.0) or 1.0
        found = [_label(self.left, 62, self.title, weight="bold")]
        for row, y, (whole, part) in zip(rows, places, self.values, strict=True):
            colour = _COLOURS.get(row.direction, _FAINT)
            for value, opacity in ((whole, 0.45), (part, 1.0)):
                width = max(1.0, (self.width - 60) * value / longest)
                found.append(
                    f'<rect x="{self.left:.0f}" y="{y:.0f}" width="{width:.1f}" '
                    f'height="{height:.0f}" fill="{colour}" fill-opacity="{opacity}"/>'
                )
            end = self.left + (self.width - 60) * whole / longest
            found.append(_label(end + 6, y + height - 4, f"{whole:.2f}"))
        return found


def _label(x: float, y: float, text: str, **more: str) -> str:
    style = {"anchor": "start", "weight": "normal", "size": "13", "fill": _TEXT} | more
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{style["size"]}" fill="{style["fill"]}" '
        f'font-weight="{style["weight"]}" text-anchor="{style["anchor"]}">{escape(text)}</text>'
    )


def rows_svg(rows: Sequence[TransferRow], title: str) -> str:
    """Bars of GB/s beside bars of CPU seconds per GB; no script, no reference to anything else."""
    bar, gap, group = 18.0, 4.0, 14.0
    good = [row for row in rows if not row.problem]
    places: list[float] = []
    y = 78.0
    labels: list[str] = []
    for number, row in enumerate(good):
        if number and row.backend != good[number - 1].backend:
            y += group
        if not number or row.backend != good[number - 1].backend:
            labels.append(_label(150, y + bar + 2, row.backend, anchor="end", weight="bold"))
        labels.append(_label(206, y + bar - 4, row.direction, anchor="end"))
        places.append(y)
        y += bar + gap
    rate = _Panel("GB/s, median", [(row.gb_per_s, row.gb_per_s) for row in good], 214, 380)
    cpu = _Panel(
        "CPU s per GB: mover (full colour) and owner",
        [(row.mover_s_per_gb + row.owner_s_per_gb, row.mover_s_per_gb) for row in good],
        620,
        380,
    )
    body = [*labels, *rate.draw(good, places, bar), *cpu.draw(good, places, bar)]
    y += 22
    for row in rows:
        if row.problem:
            body.append(_label(24, y, f"{row.backend}: not here: {row.problem}"[:140], fill=_FAINT))
            y += 18
    if any(not row.is_good for row in good):
        wrong = ", ".join(f"{row.backend} {row.direction}" for row in good if not row.is_good)
        body.append(_label(24, y, f"WRONG BYTES: {wrong}", fill="#b00020", weight="bold"))
    elif good:
        body.append(_label(24, y, "the bytes of every row were compared", fill=_FAINT))
    height = y + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="1020" height="{height:.0f}" '
        f'viewBox="0 0 1020 {height:.0f}" font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n'
        + _label(24, 32, title, size="17", weight="bold")
        + "\n"
        + "\n".join(body)
        + "\n</svg>\n"
    )
