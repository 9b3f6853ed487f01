"""When a failure becomes inevitable: keep the beginning of a run, and try many other endings.

For a number of cut points the decisions before it are kept and those after it drawn anew, some times.
The share of runs that still fail, over virtual time, shows where the mistake was made, which is
often long before it shows. Only recorded decisions are drawn anew: the policies `batch` and `pct`
order steps by the seed, which stays the same.
"""

from __future__ import annotations

import attrs
from typing_extensions import override

from ..core.choices import PrefixChoices, ReplayChoices
from .run import Play, Run, run


@attrs.frozen
class PinPoint:
    """Of `runs` runs that begin with the first `prefix` decisions, `failed` fail in the same way.

    `time_s` is when the first decision after them was taken in the failing run.
    """

    prefix: int
    time_s: float
    runs: int
    failed: int

    @property
    def ratio(self) -> float:
        """The share of runs that failed."""
        return self.failed / self.runs


@attrs.frozen
class Pin:
    """The points, in order. `inevitable` is the first from which on every run failed, if any."""

    points: list[PinPoint]
    inevitable: PinPoint | None


class _TimedChoices(ReplayChoices):
    def __init__(self, values: list[int], seed: int) -> None:
        super().__init__(values, seed)
        self.times_s: list[float] = []

    @override
    def _pick(self, n: int, label: str) -> int:
        self.times_s.append(self.world.current_time() if self.world is not None else 0.0)
        return super()._pick(n, label)


def pin(
    play: Play,
    failing: Run,
    *,
    points: int = 20,
    runs: int = 10,
) -> Pin:
    """Play `runs` endings from each of `points` places; `ValueError` if the run does not fail."""
    timed = _TimedChoices(failing.values, failing.seed)
    original = run(play, timed)
    if original.finding is None:
        raise ValueError("this run does not fail, so no moment makes it inevitable")
    count = len(timed.times_s)
    prefixes = sorted({round(count * index / points) for index in range(points + 1)})
    found = []
    for prefix in prefixes:
        failed = 0
        for tail in range(runs):
            choices = PrefixChoices(failing.values[:prefix], tail_seed=tail, seed=failing.seed)
            finding = run(play, choices).finding
            failed += finding is not None and finding.key == original.finding.key
        time_s = timed.times_s[prefix] if prefix < count else original.virtual_s
        found.append(PinPoint(prefix, time_s, runs, failed))
    inevitable = None
    for point in reversed(found):
        if point.failed < point.runs:
            break
        inevitable = point
    return Pin(found, inevitable)
