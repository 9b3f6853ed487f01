"""The machine that a simulated service runs on, and its clock: on, off, paused, for a while without a leader."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from ..core.world import World
from .interception import Interceptor


class MachineClock:
    """Seconds as one machine counts them: it may run fast or slow, and jump ahead.

    Services measure leases and timeouts on it, so that a server whose clock is off is a fault like any
    other. What the hosts' own code reads as time is `world.skew`'s business. `on_change` is called
    when it is tampered with.
    """

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


class ServiceMachine(ABC):
    """What one may do to the machine of a service, whatever it serves.

    `on_clock` is called when its clock is tampered with; `losable` are the calls whose replies
    `lose_replies` takes.
    """

    def __init__(
        self, world: World, name: str, *, on_clock: Callable[[], object], losable: Iterable[str]
    ) -> None:
        self.world, self.name = world, name
        self.interceptor = Interceptor(world, name)
        self.clock = MachineClock(world, on_clock)
        self.is_leaderless = False
        self._leader_at_s = 0.0
        self._losable = tuple(sorted(losable))

    @abstractmethod
    def boot(self) -> None:
        """Start the process on what is on the disk."""

    @abstractmethod
    def _empty_disk(self) -> None:
        """Put an empty disk in place of the one there was."""

    @abstractmethod
    def _elected(self) -> None:
        """There is a leader again."""

    def kill(self) -> None:
        """As SIGKILL: what was acknowledged is on the disk, connections are closed by the kernel."""
        self.world.kill(self.name)

    def power_off(self) -> None:
        """The machine is gone without a word: nobody gets a FIN."""
        self.world.power_off(self.name)

    def pause(self) -> None:
        """It takes connections and answers nothing; its clock goes on."""
        self.world.pause(self.name)

    def resume(self) -> None:
        """End what `pause` began. What was due meanwhile happens now."""
        self.world.resume(self.name)

    def restart(self, *, keeps_disk: bool = True) -> None:
        """Boot it again after `kill` or `power_off`, with its data or with an empty disk."""
        if not keeps_disk:
            self._empty_disk()
        self.boot()

    def refuse(self, for_s: float) -> None:
        """For so long there is no leader: what needs one is turned away, and no lease ends."""
        self.is_leaderless = True
        self._leader_at_s = max(self._leader_at_s, self.world.current_time() + for_s)
        self.world.add_row("leaderless", service=self.name, for_s=for_s)
        self.world.after(for_s, self._elect)

    def _elect(self) -> None:
        if self.world.current_time() >= self._leader_at_s:
            self.is_leaderless = False
            self.world.add_row("leader", service=self.name)
            self._elected()

    def lose_replies(self, count: int = 1, *, op: str = "") -> None:
        """The next `count` calls that change something (or of `op`) take effect unanswered."""
        self.interceptor.lose_replies(count, (op,) if op else self._losable)
