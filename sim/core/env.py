"""What the runtime takes from the world, answered by the simulation: `runtime.env.Env`.

Time is the world's, dice are a stream of the run's seed that belongs to this environment's name,
notes become rows of the trace, and `buggify` is on if the world says so. Make one per host.
"""

from __future__ import annotations

import random
from typing import Any

from trinamo.runtime.env import Clock

from .world import World

__all__ = ["SimClock", "SimEnv"]

ARMED_ONE_IN = 4
FIRES_ONE_IN = 8


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
        self._armed: dict[str, bool] = {}

    def note(self, kind: str, /, **fields: Any) -> None:
        """Add the fact to the trace; fields must be plain values (see `trace.py`)."""
        self._world.note(kind, **fields)

    @property
    def buggify_enabled(self) -> bool:
        """Whether `buggify` may ever say yes in this run; reading it decides nothing."""
        return self._world.buggify_enabled

    def buggify(self, name: str, /) -> bool:
        """Whether to take the rare path `name` now: one site in 4 is armed, then 1 call in 8."""
        if not self.buggify_enabled or self._world.is_unwinding:
            return False
        choices = self._world.choices
        if name not in self._armed:
            self._armed[name] = choices.chance(ARMED_ONE_IN, f"arm {name}")
        return self._armed[name] and choices.chance(FIRES_ONE_IN, f"buggify {name}")
