"""What plays a scenario inside its world: load, faults, waiting for the end, looking at what is left.

The verdict is `checks/`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import trio

from ..checks.blocks import lost_blocks, stale_peers
from ..checks.census import leftovers, overflows
from ..checks.events import missed, stale_reports, stale_views
from ..net.links import PROFILE_FIELDS
from .faults import Nemesis

if TYPE_CHECKING:
    from ..cluster.outcome import Outcome
    from ..cluster.plans import Scenario


STEP_S: Final = (0.2, 1.0)
"""How often the driver looks whether what it waits for has come, at first and after a while."""
IDLE_WAITED_S_MAX: Final = 5.0
"""Where links may be idle for no longer than that, a run goes on until none may be left."""
SLOWING: Final = 1.02
"""By how much each look is later than the one before."""
SHUTDOWN_S: Final = 45.0
"""Bound on the orderly end of a process: the sum of its steps' deadlines, and some."""


class ClusterDriver:
    """The driver of one run of a cluster."""

    def __init__(self, scenario: Scenario, outcome: Outcome) -> None:
        self.scenario, self.outcome = scenario, outcome
        self.world, self.cluster = outcome.world, outcome.cluster
        self.nemesis = Nemesis(outcome)

    async def run(self) -> None:
        scenario, outcome, world = self.scenario, self.outcome, self.world
        self._shape_links()
        await self.cluster.start()
        world.note("load.begin", streams=self.cluster.plan.config.data_plane.tcp.streams)
        self.nemesis.arm()
        self.cluster.start_clients()
        for number, byzantine in enumerate(scenario.byzantines):
            world.boot(f"byzantine{number}", byzantine.run, self.cluster)
        if scenario.liveness.at_s >= 0:
            world.after(scenario.liveness.at_s, self.nemesis.heal_core)
        if not await self._wait(self._is_load_over, scenario.limits.end_s):
            self._tell_unended()
        outcome.load_ended_s = trio.current_time()
        world.note("load.end")
        await self.nemesis.wait_over()
        if self.cluster.plan.config.data_plane.tcp.idle_s <= IDLE_WAITED_S_MAX:
            # Then it is overdue, if anybody has it still.
            await trio.sleep(2 * IDLE_WAITED_S_MAX)
        outcome.is_settled = await self._wait(
            lambda: not leftovers(outcome), scenario.limits.settle_s
        )
        outcome.leftovers = leftovers(outcome)
        if not await self._wait(self._are_workers_found, scenario.limits.settle_s):
            outcome.violate("expected", "a living worker is not in the store")
        world.note("settled", left=outcome.leftovers)
        # Where all that could write answers, or is seen to be dead, no block is away.
        await self._hold("I9", lost_blocks)
        if not outcome.violations:
            # Who believed every event of a watch knows what the store holds.
            await self._hold("I13", stale_views, stale_peers)
            # Routers know the workers as they are, whatever they missed.
            await self._hold("I10", stale_reports)
            for name, gaps, snapshots in missed(outcome):
                if gaps:
                    world.note("events.gap", router=name, count=gaps)
                if snapshots:
                    world.note("events.snapshot", router=name, count=snapshots)
            await self._shut_down()

    def _look(self) -> None:
        self.cluster.memory.count()
        for text in overflows(self.outcome):
            if not any(v.text == text for v in self.outcome.violations):
                self.outcome.violate("I12", text)

    def _is_load_over(self) -> bool:
        if self.scenario.liveness.at_s >= 0 and self.outcome.healed_s is None:
            return False
        names = [f"byzantine{number}" for number in range(len(self.scenario.byzantines))]
        return self.cluster.are_done(self._clients) and not any(map(self.cluster.is_up, names))

    @property
    def _clients(self) -> list[str]:
        """Whoever is promised an end: all, or once a core is healed those in it."""
        core = self.outcome.core
        return [name for name in self.cluster.clients if not core or name in core]

    def _tell_unended(self) -> None:
        unended = self.cluster.open_requests(self._clients)
        for record in unended:
            self.outcome.violate(
                "I15",
                f"request {record.name} has not ended {self.scenario.limits.end_s:g} s after the"
                f" load began\n{self.world.waiting()}",
            )
        if not unended:
            self.outcome.violate("I15", f"the clients are not done\n{self.world.waiting()}")

    def _are_workers_found(self) -> bool:
        """Whether every worker that lives, and can, is registered."""
        cluster = self.cluster
        held = cluster.store.values("instances/")
        for name in cluster.servers:
            process = cluster.processes[name]
            runtime, control = process.runtime, process.transports.control
            if not cluster.is_up(name) or process.stop.is_requested or control is None:
                continue
            if not cluster.services.is_reachable(name):
                continue
            if runtime is None or not any(str(runtime.instance_id) in key for key in held):
                return False
        return True

    async def _hold(self, invariant: str, *looks: Callable[[Outcome], Iterable[str]]) -> None:
        """Wait until no look finds anything wrong; what one does when the time is up breaks the rule."""

        def wrong() -> list[str]:
            return [text for look in looks for text in look(self.outcome)]

        await self._wait(lambda: not wrong(), self.scenario.limits.settle_s)
        for text in wrong():
            self.outcome.violate(invariant, text)

    async def _shut_down(self) -> None:
        """Everything leaves in order; what does not within its bounds is a violation."""
        names = [
            name
            for name, process in self.cluster.processes.items()
            if self.cluster.is_up(name) and process.ready.is_set()
        ]
        self.nemesis.is_leaving = True
        for name in names:
            self.cluster.processes[name].leave()
        if not await self._wait(lambda: not any(map(self.cluster.is_up, names)), SHUTDOWN_S):
            late = [name for name in names if self.cluster.is_up(name)]
            self.outcome.violate("I15", f"{late} did not shut down\n{self.world.waiting()}")

    def _shape_links(self) -> None:
        """Give links what the scenario says of them."""
        for plan in self.scenario.links:
            # A cluster sends no datagrams, so its plans say nothing of them.
            shape = {name: getattr(plan, name, None) for name in PROFILE_FIELDS}
            profile = {name: value for name, value in shape.items() if value is not None}
            self.outcome.network.links.shape(plan.source, plan.target, **profile)
            if plan.is_both_ways:
                self.outcome.network.links.shape(plan.target, plan.source, **profile)

    async def _wait(self, condition: Callable[[], object], bound_s: float) -> bool:
        """Poll: a crashed process can tell nobody, so there is no event to wait for."""
        step_s, step_s_max = STEP_S
        with trio.move_on_after(bound_s):
            while not condition():
                self._look()
                await trio.sleep(step_s)
                step_s = min(step_s * SLOWING, step_s_max)
        return bool(condition())
