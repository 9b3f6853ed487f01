"""What processes hold while they are under load, every few seconds: written down, judged, and drawn.

`census.py` looks at rest, between turns; what only grows slowly shows here. Each life of a process is a line of
its own, and the first part of it counts for nothing: rings, caches and the allocator's arenas fill then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from statistics import linear_regression, median
from typing import Final

import attrs
import httpx
import trio

from tests.soak.census import task_count
from tests.soak.processes import Process, Server, descriptors_of, disk_bytes, rss_bytes

LOOK_S: Final = 5.0
WARM_S: Final = 300.0
WINDOW_S: Final = 600.0
"""Of shorter runs, in which a slope would be noise: the first fifth of it is held beside the last."""
LEAST_S: Final = 120.0
"""Over less than this growth says nothing."""
MORE: Final = 0.03
"""What memory may have grown by in a window."""
LONG_S: Final = 3600.0
LONG_WARM_S: Final = 900.0
"""From so long a life on its slope is judged, behind a longer beginning."""
RSS_MORE_MIB: Final = 1.0
"""An hour."""
COUNT_MORE: Final = 1.0
"""Likewise of descriptors and tasks, which go up and down with the load by more than that."""
MEASURES: Final = ("RSS MiB", "descriptors", "tasks", "disk MiB")
FILE: Final = "series.csv"
PICTURE: Final = "series.svg"

Values = tuple[float | None, ...]
"""One for each of `MEASURES`; None where there is none."""


@attrs.frozen
class Life:
    """One process between its birth and its end."""

    name: str
    pid: int
    born_s: float


@attrs.define
class Series:
    """Of every life: when it was looked at, and what it held."""

    folder: Path
    lives: dict[Life, list[tuple[float, Values]]] = attrs.field(factory=dict)

    async def look(
        self, client: httpx.AsyncClient, members: Iterable[Process], servers: Mapping[Server, float]
    ) -> None:
        """Ask everybody who is up; `servers` with their births."""
        now_s = trio.current_time()
        for each in members:
            if each.is_up:
                tasks = await _tasks(client, each)
                self._add(now_s, Life(each.name, each.pid, each.born_s), tasks, None)
        for server, born_s in servers.items():
            if server.is_up:
                disk = disk_bytes(server.server.log_path.parent / "data") / 2**20
                self._add(now_s, Life(server.name, server.pid, born_s), None, disk)

    def _add(self, now_s: float, life: Life, tasks: float | None, disk: float | None) -> None:
        rss = rss_bytes(life.pid)
        if not rss:
            return
        values = (rss / 2**20, float(descriptors_of(life.pid)), tasks, disk)
        self.lives.setdefault(life, []).append((now_s, values))
        row = (f"{now_s:.0f}", life.name, str(life.pid), f"{now_s - life.born_s:.0f}")
        file = self.folder / FILE
        is_new = not file.exists()
        with file.open("a", encoding="utf-8") as out:
            if is_new:
                out.write(",".join(("at_s", "process", "pid", "age_s", *MEASURES)) + "\n")
            told = ("" if each is None else f"{each:.2f}" for each in values)
            out.write(",".join((*row, *told)) + "\n")

    def verdict(self) -> tuple[list[str], list[str]]:
        """A line for each life that was old enough to tell, and those that grew too much."""
        lines, found = [], []
        for life, samples in sorted(self.lives.items(), key=lambda each: attrs.astuple(each[0])):
            age_s = samples[-1][0] - life.born_s
            judge = _slopes if age_s >= LONG_S else _growth
            told = judge(life, samples)
            if told is None:
                continue
            text, is_more = told
            lines.append(f"{life.name} ({life.pid}): {text}")
            if is_more and life.name not in ("etcd", "nats"):
                found.append(f"it grew: {lines[-1]}")
        return lines or ["no process was old enough to tell"], found

    def draw(self) -> Path:
        """A picture of all of it, one panel a measure; its path."""
        path = self.folder / PICTURE
        path.write_text(_picture(self.lives), "utf-8")
        return path


async def _tasks(client: httpx.AsyncClient, member: Process) -> float | None:
    try:
        told = await client.get(f"{member.status_url}/tasks", timeout=2)
    except httpx.HTTPError:
        # It was stopped or killed since.
        return None
    return float(task_count(told.json())) if told.status_code == 200 else None


Told = tuple[str, bool]


def _growth(life: Life, samples: list[tuple[float, Values]]) -> Told | None:
    """Of memory, from the first fifth of a window to its last: two samples do not decide."""
    warm = [(at, values[0] or 0.0) for at, values in samples if at >= life.born_s + WARM_S]
    last = [each for each in warm if each[0] >= warm[-1][0] - WINDOW_S]
    if not last or last[-1][0] - last[0][0] < LEAST_S:
        return None
    fifth = max(1, len(last) // 5)
    first, end = (median(rss for _, rss in part) for part in (last[:fifth], last[-fifth:]))
    growth = end / first - 1
    span_s = last[-1][0] - last[0][0]
    return f"{first:.1f} to {end:.1f} MiB in {span_s:.0f} s, {growth:+.1%}", growth > MORE


def _slopes(life: Life, samples: list[tuple[float, Values]]) -> Told | None:
    """Of everything, an hour, behind the beginning of a long life."""
    words, is_more = [], False
    for number, measure in enumerate(MEASURES):
        points = [
            (at / 3600, value)
            for at, values in samples
            if at >= life.born_s + LONG_WARM_S and (value := values[number]) is not None
        ]
        if len(points) < 10:
            continue
        slope = linear_regression(*zip(*points, strict=True)).slope
        words.append(f"{measure} {points[-1][1]:.0f}, {slope:+.2f} an hour")
        bounds = (RSS_MORE_MIB, COUNT_MORE, COUNT_MORE)
        is_more |= number < len(bounds) and slope > bounds[number]
    return ("; ".join(words), is_more) if words else None


WIDTH, PANEL, LEFT, RIGHT, TOP = 900, 230, 64, 150, 34
COLOURS: Final = ("#0550ae", "#bc4c00", "#1a7f37", "#6639ba")
DASHES: Final = ("", "7 4", "2 4", "10 3 2 3")


def _picture(lives: Mapping[Life, list[tuple[float, Values]]]) -> str:
    names = sorted({life.name for life in lives})
    times = [at for samples in lives.values() for at, _ in samples] or [0.0]
    begin, span_s = min(times), max(max(times) - min(times), 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {PANEL * len(MEASURES)}"',
        ' font-family="system-ui, sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>',
    ]
    for panel, measure in enumerate(MEASURES):
        lines = {
            life: [(at, value) for at, values in samples if (value := values[panel]) is not None]
            for life, samples in lives.items()
        }
        top = max((value for points in lines.values() for _, value in points), default=1.0) or 1.0
        foot, height = PANEL * (panel + 1) - 24, PANEL - TOP - 24
        parts.append(
            f'<text x="{LEFT}" y="{foot - height - 12}" font-weight="600">{escape(measure)}</text>'
        )
        for share in (0.0, 0.5, 1.0):
            y = foot - share * height
            parts.append(f'<path stroke="#d1d9e0" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(
                f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * top:.3g}</text>'
            )
        for each in range(5):
            x = LEFT + each / 4 * (WIDTH - LEFT - RIGHT)
            minutes = each / 4 * span_s / 60
            parts.append(
                f'<text x="{x:.1f}" y="{foot + 16}" text-anchor="middle">{minutes:.3g} min</text>'
            )
        for life, points in lines.items():
            way = "L".join(
                f"{LEFT + (at - begin) / span_s * (WIDTH - LEFT - RIGHT):.1f} {foot - value / top * height:.1f}"
                for at, value in points
            )
            if points:
                parts.append(f'<path fill="none" {_stroke(names.index(life.name))} d="M{way}"/>')
        told = [name for name in names if any(each.name == name and lines[each] for each in lines)]
        for row, name in enumerate(told):
            y = foot - height + 17 * row
            x = WIDTH - RIGHT + 14
            parts.append(f'<path {_stroke(names.index(name))} d="M{x} {y}h22"/>')
            parts.append(f'<text x="{x + 28}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _stroke(number: int) -> str:
    dash = DASHES[number // 4 % 4]
    return f'stroke="{COLOURS[number % 4]}" stroke-width="1.5" stroke-dasharray="{dash}"'
