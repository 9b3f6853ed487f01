"""The machine that a simulated service runs on: on, off, paused, and for a while without a leader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from ..core.world import World
from .interception import Interceptor
from .machine_clock import MachineClock


class Machine(ABC):
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
        if self.world.current_time() < self._leader_at_s:
            return
        self.is_leaderless = False
        self.world.add_row("leader", service=self.name)
        self._elected()

    def lose_replies(self, count: int = 1, *, op: str = "") -> None:
        """The next `count` calls that change something (or of `op`) take effect unanswered."""
        self.interceptor.lose_replies(count, (op,) if op else self._losable)
