"""The seam the simulator replaces: clock, chance, notes. Nothing else differs.

trio's own clock carries every timeout, so `Clock.now` is only for measuring, and `Clock.wall` for
time stamps. Nothing in `runtime/` or `transports/tcp` reads `time`, `random`, `uuid` or
`os.urandom` itself; a lint rule says so.
"""

from __future__ import annotations

import random
import time
from typing import Any, Protocol

import trio

__all__ = ["Clock", "Env", "RealClock", "RealEnv"]


class Clock(Protocol):
    """Where time comes from."""

    def now(self) -> float:
        """Seconds on a monotonic clock with an arbitrary origin."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch; may jump, so never subtract two of them."""
        ...


class Env(Protocol):
    """Everything the runtime takes from the world besides trio and its sockets."""

    clock: Clock
    rng: random.Random

    def note(self, kind: str, /, **fields: Any) -> None:
        """Record a fact worth checking, such as `stream.token`; costs nothing in real life."""
        ...


class RealClock:
    """The machine's clocks."""

    def now(self) -> float:
        return trio.current_time()

    def wall(self) -> float:
        return time.time()  # noqa: TID251 -- the one place that reads the wall clock


class RealEnv:
    """The world as it is: real clocks and the operating system's random numbers."""

    def __init__(self) -> None:
        self.clock: Clock = RealClock()
        self.rng: random.Random = random.SystemRandom()

    def note(self, kind: str, /, **fields: Any) -> None:
        pass
