"""The seam the simulator replaces: clock, chance, notes. Nothing else differs.

trio's own clock carries every timeout, so `Clock.now` is only for measuring, and `Clock.wall` for
time stamps. Nothing in `runtime/` or `transports/tcp` reads `time`, `random`, `uuid` or
`os.urandom` itself; a lint rule says so.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any, Final, Protocol

import trio


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


def draw_id(rng: random.Random) -> str:
    """64 bits that nobody else draws, as 16 hexadecimal digits: for instances, requests, jobs."""
    return f"{rng.getrandbits(64):016x}"


class RealClock:
    """The machine's clocks."""

    # Read for every token: a function of our own round it would be half of what it costs.
    now = staticmethod(trio.current_time)

    wall = staticmethod(time.time)  # noqa: TID251 -- the one place that reads the wall clock


_WORDS: Final = 512
_WORD_BITS: Final = 64


class SystemDice(random.SystemRandom):
    """The operating system's random numbers, fetched 4 KiB at a time: ids are drawn per request.

    Each bit is given out once, to whatever thread, and none of them twice after a fork.
    """

    def __init__(self) -> None:
        super().__init__()
        self._words: list[int] = []
        os.register_at_fork(after_in_child=self._words.clear)

    def getrandbits(self, k: int) -> int:
        """`k` random bits as one number."""
        if 0 < k <= _WORD_BITS:
            return self._word() >> (_WORD_BITS - k)
        if k == 2 * _WORD_BITS:
            return self._word() << _WORD_BITS | self._word()
        return super().getrandbits(k)

    def _word(self) -> int:
        while True:
            try:
                return self._words.pop()
            except IndexError:
                fetched = memoryview(os.urandom(_WORDS * _WORD_BITS // 8))  # noqa: TID251 -- the one place
                self._words += fetched.cast("Q")


_DICE: Final = SystemDice()


class RealEnv:
    """The world as it is: real clocks and the operating system's random numbers."""

    def __init__(self) -> None:
        self.clock: Clock = RealClock()
        self.rng: random.Random = _DICE

    def note(self, kind: str, /, **fields: Any) -> None:
        pass
