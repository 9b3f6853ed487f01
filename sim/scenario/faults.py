"""What a scenario may do to its cluster, and when: the nemesis.

A fault strikes at a time, drawn from a range, or after the n-th note of a kind; most are undone
after a while. Which of several hosts it strikes, and whether at all if it is a `maybe`, are
decisions of the run, so a shrinker can take them back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from ..cluster.plans import FaultPlan
from ..cluster.services import BROKER, STORE
from ..faults import ON_HOSTS, ON_LINKS, effect, heal_core

if TYPE_CHECKING:
    from ..cluster.outcome import Outcome


TIME_STEPS: Final = 16


HOSTLESS: Final = ("compact", "forge", "restore")
LINKED: Final = ("cut", "cut_one_way", "reset", "swallow")
FAULTS: Final = (
    *HOSTLESS,
    *LINKED,
    *ON_HOSTS,
    *("stop", "boot", "skew", "lose_replies", "exhaust", "stall_adapter", "break_adapter"),
)
"""Every word that `do` may be; `docs/simulation.md` says what each is."""


class Nemesis:
    """Carries out the faults of one run on its cluster."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.world, self.network = outcome.world, outcome.network
        self.cluster = outcome.cluster
        self._waiting: list[FaultPlan] = []
        """Those that are to strike at a time, and have not."""
        self.over_s = 0.0
        """When the last fault so far that ends is over."""
        self.is_leaving = False
        """Everybody was told to leave: no process is started any more."""

    def arm(self) -> None:
        """Ready every fault of the scenario; called when the load begins."""
        for fault in self.outcome.scenario.faults:
            if fault.maybe and not self.world.choices.chance(2, f"fault {fault.do}"):
                continue
            if fault.after_note:
                kind, _, number = fault.after_note.partition("#")
                delay_s = self._drawn(fault.delay)
                self.world.after_note(
                    kind, int(number or 1), self._strike, fault, delay_s=delay_s, name=str(fault)
                )
            else:
                self._waiting.append(fault)
                self.world.after(self._drawn(fault.at or 0.0), self._strike, fault)

    def missed(self) -> Iterator[str]:
        """A sentence about each fault whose time did not come."""
        return (f"{fault} never struck: the run was over before" for fault in self._waiting)

    def _drawn(self, time: float | tuple[float, float]) -> float:
        if not isinstance(time, tuple):
            return time
        low, high = time
        step = self.world.choices.below(TIME_STEPS, "fault time")
        return low + (high - low) * step / (TIME_STEPS - 1)

    def _strike(self, fault: FaultPlan) -> None:
        if self.outcome.healed_s is not None:
            # The faulty phase is over; what comes after it would break the promise of the other.
            return
        if fault in self._waiting:
            self._waiting.remove(fault)
        host = self._pick(fault.on)
        other = self._pick(fault.to)
        self.world.note("fault", do=fault.do, on=host, to=other)
        undo = self._effect(fault, host, other)
        if fault.lasts_s != math.inf and undo is not None:
            self.over_s = max(self.over_s, self.world.current_time() + fault.lasts_s)
            self.world.after(fault.lasts_s, self._undo, fault, host, undo)

    def _undo(self, fault: FaultPlan, host: str, undo: Callable[[], object]) -> None:
        outcome = self.outcome
        if outcome.healed_s is not None and host not in outcome.core:
            return
        self.world.note("fault.over", do=fault.do, on=host)
        undo()

    def _pick(self, pattern: str) -> str:
        if "*" not in pattern:
            return pattern
        matching = [name for name in self.cluster.hosts if fnmatchcase(name, pattern)]
        return matching[self.world.choices.below(len(matching), f"one of {pattern}")]

    def _effect(self, fault: FaultPlan, host: str, other: str) -> Callable[[], object] | None:
        """Do it; what undoes it, if anything can."""
        world, network, cluster = self.world, self.network, self.cluster
        if fault.do in (*ON_HOSTS, *ON_LINKS):
            hosts = cluster.hosts
            return effect(world, network, fault.do, host, other, hosts=hosts, boot=self._boot)
        match fault.do:
            case "boot":
                self._boot(host)
            case "swallow":
                network.swallow(host, other)
            case "stop":
                cluster.processes[host].leave()
            case "skew":
                off_s = world.host(host).wall.off_by(world.current_time())
                world.skew(host, off_s + fault.seconds, world.host(host).wall.drift)
            case "lose_replies":
                cluster.services.lose_replies(host, fault.count)
            case "compact" | "restore" | "forge":
                return self._server_effect(fault.do)
            case "exhaust":
                network.exhausted.add(host)
                return lambda: network.exhausted.discard(host)
            case _:
                fabric, stalls = cluster.memory.fabric, fault.do == "stall_adapter"
                (fabric.stalled if stalls else fabric.broken).add(host)
                return partial(fabric.go_on if stalls else fabric.broken.discard, host)
        return None

    def _server_effect(self, do: str) -> Callable[[], object] | None:
        etcd, nats = self.cluster.services.etcd, self.cluster.services.nats
        if do == "compact":
            etcd.compact()
            return None
        if do == "restore":
            return partial(etcd.restore, etcd.back_up())
        nats.forge(is_on=True)
        return partial(nats.forge, is_on=False)

    def _boot(self, host: str) -> None:
        if not (self.world.host(host).is_running or self.is_leaving):
            self.cluster.boot(host)

    def heal_core(self) -> None:
        """End the faulty phase: one frontend, one worker, store and broker work from now on.

        Clients whose frontend is among them are too; all others are cut off for good.
        """
        cluster, choices = self.cluster, self.world.choices
        frontends, workers = cluster.frontends[:1], cluster.workers
        worker = workers[choices.below(len(workers), "core worker")]
        clients = cluster.clients_of(frontends)
        core = (STORE, BROKER, *frontends, worker, *clients)
        self.outcome.core, self.outcome.healed_s = core, self.world.current_time()

        def boot(name: str) -> None:
            if name not in clients:
                self._boot(name)

        for name in (*frontends, worker):
            # Who was told to leave is about to be no core any more; a new process takes its place.
            if cluster.processes[name].stop.is_requested:
                self.world.kill(name)
        heal_core(self.world, self.network, core, boot)

    async def wait_over(self) -> None:
        """Return once every fault that ends has ended; at once after the faulty phase."""
        if self.outcome.healed_s is None:
            await trio.sleep_until(self.over_s)
