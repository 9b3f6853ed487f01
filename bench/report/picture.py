"""A few lines, such as CPU per token against streams, as an SVG file; told apart without colour."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 780, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 226, 56, 56
STYLE = """
svg { font: 13px system-ui, sans-serif }
.page { fill: #ffffff } .ink { fill: #1f2328 } .soft { fill: #59636e }
.grid { stroke: #d1d9e0; stroke-width: 1 } .line { fill: none; stroke-width: 2 }
.a { stroke: #0550ae } .b { stroke: #bc4c00 } .c { stroke: #1a7f37 } .d { stroke: #6639ba }
.mark { fill: #ffffff; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  .page { fill: #0d1117 } .ink { fill: #f0f6fc } .soft { fill: #9198a1 } .grid { stroke: #3d444d }
  .a { stroke: #4493f8 } .b { stroke: #f0883e } .c { stroke: #3fb950 } .d { stroke: #ab7df8 }
  .mark { fill: #0d1117 }
}
"""
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
DASHES = ("", "7 4", "2 4", "10 3 2 3")
CLASSES = "abcd"


def draw(
    path: Path,
    title: str,
    note: str,
    lines: Mapping[str, Sequence[tuple[int, float]]],
    *,
    x_label: str = "streams",
    y_label: str = "CPU per token, µs",
) -> None:
    """One line per name, points of what the labels say; both axes logarithmic."""
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    low = max(y for y in TICKS if y <= min(ys))
    high = min(y for y in TICKS if y >= max(ys))

    def x_of(streams: float) -> float:
        share = math.log(streams / min(xs)) / math.log(max(xs) / min(xs))
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y_of(cost: float) -> float:
        return (
            HEIGHT - BOTTOM - math.log(cost / low) / math.log(high / low) * (HEIGHT - TOP - BOTTOM)
        )

    names = ", ".join(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}: {escape(names)}</title><style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="ink" x="16" y="24" font-size="15" font-weight="600">{escape(title)}</text>',
        f'<text class="soft" x="16" y="43">{escape(note)}</text>',
    ]
    for cost in (each for each in TICKS if low <= each <= high):
        y = y_of(cost)
        parts += [
            f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>',
            f'<text class="soft" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{cost}</text>',
        ]
    parts += [
        f'<text class="soft" x="{x_of(streams):.1f}" y="{HEIGHT - BOTTOM + 20}" '
        f'text-anchor="middle">{streams}</text>'
        for streams in sorted(set(xs))
    ]
    height = (HEIGHT + TOP - BOTTOM) / 2
    middle = (LEFT + WIDTH - RIGHT) / 2
    turned = (
        f'<text class="soft" transform="translate(16 {height}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    parts += [
        f'<text class="soft" x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">',
        f"{escape(x_label)}</text>",
        turned,
    ]
    labels = spread([(y_of(points[-1][1]), name) for name, points in lines.items()])
    for number, (name, points) in enumerate(lines.items()):
        kind, dash = CLASSES[number % 4], DASHES[number % 4]
        places = [(x_of(x), y_of(y)) for x, y in points]
        way = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path class="line {kind}" stroke-dasharray="{dash}" d="M{way}"/>')
        parts += [marker(number, kind, x, y) for x, y in places]
        parts.append(
            f'<text class="ink" x="{WIDTH - RIGHT + 14}" y="{labels[name] + 4:.1f}">{escape(name)}</text>'
        )
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", "utf-8")


def spread(labels: list[tuple[float, str]], apart: float = 18) -> dict[str, float]:
    """The labels' heights, none over another."""
    places: dict[str, float] = {}
    last = -math.inf
    for y, name in sorted(labels):
        last = max(y, last + apart)
        places[name] = last
    return places


def marker(number: int, kind: str, x: float, y: float) -> str:
    """Circle, square, triangle or diamond."""
    if number % 4 == 0:
        return f'<circle class="mark {kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    corners = {
        1: [(-4, -4), (4, -4), (4, 4), (-4, 4)],
        2: [(0, -5), (5, 4), (-5, 4)],
        3: [(0, -5.5), (5.5, 0), (0, 5.5), (-5.5, 0)],
    }[number % 4]
    way = "L".join(f"{x + dx:.1f} {y + dy:.1f}" for dx, dy in corners)
    return f'<path class="mark {kind}" d="M{way}Z"/>'
