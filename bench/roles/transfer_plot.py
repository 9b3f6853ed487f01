"""Bars as an SVG file, without a library: what `bench/bench_transfer.py --plot` writes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

_BAR, _LEFT, _WIDTH = 18, 190, 520


def plot(path: Path, title: str, unit: str, bars: Sequence[tuple[str, float]]) -> None:
    """One bar a row, in the order given; widths relative to the largest value."""
    largest = max((value for _, value in bars), default=0.0) or 1.0
    height = (len(bars) + 2) * (_BAR + 6)
    width = _LEFT + _WIDTH + 90
    font = 'font-family="sans-serif" font-size="13"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {font}>',
        f'<rect width="100%" height="100%" fill="white"/><text x="8" y="18">{escape(title)}</text>',
    ]
    for row, (name, value) in enumerate(bars):
        top = (row + 1) * (_BAR + 6) + 6
        width = max(1.0, _WIDTH * value / largest)
        lines += [
            f'<text x="{_LEFT - 8}" y="{top + 14}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{_LEFT}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="#3b6ea5"/>',
            f'<text x="{_LEFT + width + 6:.1f}" y="{top + 14}">{value:.2f} {escape(unit)}</text>',
        ]
    path.write_text("\n".join([*lines, "</svg>"]) + "\n", "utf-8")
