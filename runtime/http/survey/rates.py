"""How fast counters grow that are read now and then."""

from __future__ import annotations


class Rates:
    """Differences per second of counters that only grow; one that shrank began again at zero."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}

    def update(self, name: str, value: float, at_s: float) -> float:
        """The rate of `name` since its last update; 0 the first time."""
        before = self._last.get(name)
        self._last[name] = (value, at_s)
        if before is None or at_s <= before[1]:
            return 0.0
        grown = value - before[0] if value >= before[0] else value
        return grown / (at_s - before[1])

    def forget(self, before_s: float) -> None:
        """Forget what was last updated before then."""
        self._last = {name: each for name, each in self._last.items() if each[1] >= before_s}
