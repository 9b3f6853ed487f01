"""The monotonic clock of one simulated machine: it may run fast or slow, and jump ahead.

Services measure leases and timeouts on it, so that a server whose clock is off is a fault like any
other. What the hosts' own code reads as time is `world.skew`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..core.world import World


class MachineClock:
    """Seconds as one machine counts them. `on_change` is called when it is tampered with."""

    def __init__(self, world: World, on_change: Callable[[], object]) -> None:
        self._world = world
        self._on_change = on_change
        self._rate = 1.0
        self._anchor = (0.0, 0.0)

    def now(self) -> float:
        """What it shows."""
        at_s, shown_s = self._anchor
        return shown_s + (self._world.current_time() - at_s) * self._rate

    def world_time(self, shown_s: float) -> float:
        """When it will show this, in the world's time, if nobody tampers with it."""
        if shown_s == math.inf:
            return math.inf
        at_s, anchor_s = self._anchor
        return at_s + (shown_s - anchor_s) / self._rate

    @property
    def rate(self) -> float:
        """How many of its seconds pass in one of the world's; 1 is right, and may be set."""
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        if not rate > 0:
            raise ValueError(f"a clock cannot run at a rate of {rate}")
        self._set(self.now(), rate)

    def skip(self, seconds: float) -> None:
        """Jump ahead, as the clock of a machine that slept."""
        if seconds < 0:
            raise ValueError("a monotonic clock never goes back")
        self._set(self.now() + seconds, self._rate)

    def _set(self, shown_s: float, rate: float) -> None:
        self._anchor = (self._world.current_time(), shown_s)
        self._rate = rate
        self._on_change()
