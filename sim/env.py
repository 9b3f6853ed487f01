"""What a simulated process is given as its environment: the world's clocks, dice of its own, and notes.

The one seam between the product and its simulation (`runtime/env.py`); everything else is put in its
place below the code, which sees nothing of it.
"""

from __future__ import annotations

import random
from typing import Any

from trinamo.runtime.env import Clock

from .core.world import World


class SimClock:
    """The virtual clocks: one monotonic for all hosts, one wall clock per host with its skew."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> float:
        """Virtual seconds since the world began."""
        return self._world.current_time()

    def wall(self) -> float:
        """Unix seconds as the running task's host believes them to be."""
        return self._world.wall()


class SimEnv:
    """Implements `runtime.env.Env`. `name` picks the stream of dice.

    Give every life of a host a name of its own, such as `worker-1.2`: a restarted process must not
    draw the ids of its dead predecessor again.
    """

    def __init__(self, world: World, name: str) -> None:
        self.clock: Clock = SimClock(world)
        self.rng: random.Random = world.choices.stream(f"env/{name}")
        self._world = world

    def note(self, kind: str, /, **fields: Any) -> None:
        """Add the fact to the trace; fields must be plain values (see `trace.py`)."""
        self._world.note(kind, **fields)
