"""What the runtime takes from the world, answered by the simulation: `runtime.env.Env`.

Time is the world's, dice are a stream of the run's seed that belongs to this environment's name,
and notes become rows of the trace. Make one per host.
"""

from __future__ import annotations

import random
from typing import Any

from trinamo.runtime.env import Clock

from .world import World


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
