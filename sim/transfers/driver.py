"""What plays a scenario of transfers: boots the hosts, strikes, waits, and looks at what is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from typing_extensions import override

from ..scenario_driver import Driver
from ..scenario_faults import Nemesis
from .stage import TransferStage

if TYPE_CHECKING:
    from ..scenario import Outcome, Scenario
    from .plan import TransferPlan

__all__ = ["TransferDriver"]


class TransferDriver(Driver):
    """The driver of one run of transfers."""

    def __init__(self, scenario: Scenario, outcome: Outcome, plan: TransferPlan) -> None:
        super().__init__(scenario, outcome)
        self.stage = outcome.transfers = TransferStage(outcome.world, outcome.network, plan)
        self.nemesis = Nemesis(outcome, self.stage)

    async def run(self) -> None:
        """Until every request has ended and nothing of any is left, or the bounds are over."""
        outcome, stage, limits = self.outcome, self.stage, self.scenario.limits
        self.shape_links(stage.hosts)
        outcome.load_started_s = trio.current_time()
        self.world.note("load.begin")
        self.nemesis.arm()
        await stage.start()
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

    @override
    def look(self) -> None:
        self.stage.count()
