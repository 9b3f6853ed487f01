"""What plays a scenario of transfers: boots the hosts, strikes, waits, and looks at what is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from typing_extensions import override

from ..cluster.workload import COMPLETE
from ..scenario.driver import SHUTDOWN_S, Driver
from ..scenario.faults import Nemesis
from .stage import TransferStage

if TYPE_CHECKING:
    from ..scenario.outcome import Outcome
    from ..scenario.scenario import Scenario
    from .plan import TransferPlan

__all__ = ["TransferDriver"]


class TransferDriver(Driver):
    """The driver of one run of transfers."""

    def __init__(self, scenario: Scenario, outcome: Outcome, plan: TransferPlan) -> None:
        super().__init__(scenario, outcome)
        self.stage = outcome.transfers = TransferStage(
            outcome.world, outcome.network, plan, outcome.cluster.services
        )
        self.nemesis = Nemesis(outcome, self.stage)

    async def run(self) -> None:
        """Until every request has ended and nothing of any is left, or the bounds are over."""
        outcome, stage, limits = self.outcome, self.stage, self.scenario.limits
        self.shape_links(stage.hosts)
        await stage.start()
        outcome.load_started_s = trio.current_time()
        self.world.note("load.begin")
        self.nemesis.arm()
        stage.begin()
        if not await self.wait(lambda: stage.is_load_over, limits.end_s):
            outcome.violate(
                "I15",
                f"{stage.open_requests} have not ended {limits.end_s:g} s after the load began\n"
                f"{self.world.waiting()}",
            )
        outcome.load_ended_s = trio.current_time()
        self.world.note("load.end")
        await self.nemesis.wait_over()
        outcome.is_settled = await self.wait(lambda: not stage.leftovers(), limits.settle_s)
        outcome.leftovers = stage.leftovers()
        self.world.note("settled", left=outcome.leftovers)
        for text in stage.lost():
            outcome.violate("I9", text)
        self._look_at_the_last()
        await self._look_at_quarantine()
        if not outcome.violations:
            await self._look_at_the_store()
            await self._shut_down()

    def _look_at_the_last(self) -> None:
        """Requests that began well after the last fault was over have no excuse but to leave."""
        stage, ends = self.stage, (COMPLETE, "aborted", "")
        whole_s = self.nemesis.over_s + stage.plan.whole_after_s
        for record in stage.records:
            is_leaving = stage.processes[record.host].told.is_set()
            if record.started_s >= whole_s and record.outcome not in ends and not is_leaving:
                self.outcome.violate(
                    "I15",
                    f"{record.name} began at {record.started_s:.3f} s, after all faults, and ended"
                    f" with {record.outcome!r}",
                )

    async def _look_at_quarantine(self) -> None:
        """Where all that could write answers, or is seen to be dead, no block stays away."""
        stage = self.stage
        await self.wait(lambda: not any(stage.quarantined()), self.scenario.limits.settle_s)
        for text in stage.quarantined():
            self.outcome.violate("I9", text)

    async def _look_at_the_store(self) -> None:
        """I13 in the end: all that live are found, and nobody believes in what is gone."""
        stage = self.stage
        await self.wait(lambda: not any(stage.unknown()), self.scenario.limits.settle_s)
        for text in stage.unknown():
            self.outcome.violate("I13", text)

    async def _shut_down(self) -> None:
        """All leave in order; who does not within its bounds is a violation."""
        names = self.stage.tell_to_leave()
        if not await self.wait(lambda: not any(map(self.is_running, names)), SHUTDOWN_S):
            late = [name for name in names if self.is_running(name)]
            self.outcome.violate("I15", f"{late} did not shut down\n{self.world.waiting()}")

    @override
    def look(self) -> None:
        self.stage.count()
