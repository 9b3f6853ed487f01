"""A scenario: a cluster, its load, what breaks and when, and what must hold; and how it is played.

`load_scenario` (`file.py`) reads one from TOML; `Scenario.run` plays it on given choices
and judges it. Only what a run records can differ between two runs of one scenario and one list of
choices: nothing. Read next: `faults.py` (what can be done to a cluster), `checks/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs

from ..checks import judge
from ..cluster.cluster import Cluster, ClusterPlan
from ..cluster.network import ClusterNetwork
from ..cluster.rogues import Rogue
from ..core.choices import Choices
from ..core.errors import Deadlock, SimulationError, StepLimit, TimeLimit, Violation
from ..core.scheduler import Policy
from ..core.world import World
from ..mutants.bugs import planted
from ..programs import leased_queue, queue_consumers
from ..transfers.driver import TransferDriver
from ..transfers.plan import TransferPlan
from .driver import ClusterDriver
from .plans import (
    Breach,
    Expect,
    Limits,
    LinkPlan,
    Liveness,
    NetworkPlan,
    QueuePlan,
    Twin,
)

if TYPE_CHECKING:
    from ..cluster.load import RequestRecord
    from ..core.trace import Row
    from ..transfers.stage import KvRecord, TransferStage
    from .faults import FaultPlan

__all__ = [
    "Breach",
    "Expect",
    "Limits",
    "LinkPlan",
    "Liveness",
    "NetworkPlan",
    "Outcome",
    "QueuePlan",
    "Scenario",
    "Twin",
]


@attrs.define(eq=False, slots=False)
class Outcome:
    """What became of a run."""

    scenario: Scenario
    world: World
    network: ClusterNetwork
    cluster: Cluster
    digest: str = ""
    breaches: list[Breach] = attrs.Factory(list)
    load_started_s: float = 0.0
    load_ended_s: float | None = None
    healed_s: float | None = None
    is_settled: bool = False
    """Whether nothing of any request was left in the end."""
    leftovers: dict[str, float] = attrs.Factory(dict)
    core: tuple[str, ...] = ()
    """The healed hosts of a liveness phase."""
    transfers: TransferStage | None = None
    """What was played instead of the cluster, which is empty then."""

    @property
    def records(self) -> Sequence[RequestRecord | KvRecord]:
        """Every request, as whoever asked it saw it."""
        return (self.transfers or self.cluster).records

    @cached_property
    def told(self) -> list[Row]:
        """What the trace says without its busiest rows; read once the run is over."""
        return self.world.trace.told

    @property
    def untested(self) -> list[str]:
        """What the scenario is about and this run did not show, in sentences; see `World.untested`."""
        return self.world.untested

    def violate(self, invariant: str, text: str) -> None:
        """Write one down."""
        self.breaches.append(Breach(invariant, text, self.world.current_time()))


@attrs.frozen(kw_only=True)
class Scenario:
    """One file of the catalogue."""

    name: str
    about: str
    covers: tuple[str, ...] = ()
    """Rows of the protocol's event table, and failure scenarios such as `S2`."""
    policy: Policy | None = None
    """None leaves it to what is played: `grouped` for queues, which are searched, else `batch`."""
    cluster: ClusterPlan = attrs.Factory(ClusterPlan)
    queue: QueuePlan | None = None
    """Instead of the cluster."""
    transfers: TransferPlan | None = None
    """Likewise."""
    network: NetworkPlan = attrs.Factory(NetworkPlan)
    links: tuple[LinkPlan, ...] = ()
    rogues: tuple[Rogue, ...] = ()
    faults: tuple[FaultPlan, ...] = ()
    liveness: Liveness = attrs.Factory(Liveness)
    limits: Limits = attrs.Factory(Limits)
    expect: Expect = attrs.Factory(Expect)
    twins: tuple[Twin, ...] = ()

    def run(self, choices: Choices, *, bug: str = "", buggify: bool = False) -> Outcome:
        """Play it in a fresh world and judge it; `bug` names a mistake to put back.

        A run that fails on its own account (deadlock, limits, a process that crashed) is a
        violation too. Raises `Escape` if something reached for the real world.
        """
        if self.queue is not None:
            return self._run_queue(self.queue, choices, is_fenced=bug != "stale_ack")
        world = World(
            choices,
            policy=self.policy or "batch",
            steps_max=self.limits.steps,
            virtual_s_max=self.limits.virtual_s,
            buggify=buggify,
        )
        plan = self.network
        network = ClusterNetwork(
            world,
            latency_s=plan.latency_s,
            jitter_s=plan.jitter_s,
            tear_one_in=plan.tear_one_in,
            short_one_in=plan.short_one_in,
            window_bytes=plan.window_bytes,
            connect_timeout_s=plan.connect_timeout_s,
        )
        cluster = Cluster(world, network, self.cluster)
        outcome = Outcome(self, world, network, cluster)
        driver: ClusterDriver | TransferDriver = ClusterDriver(self, outcome)
        if self.transfers is not None:
            driver = TransferDriver(self, outcome, self.transfers)
        with planted(bug) if bug else nullcontext():
            try:
                world.run(driver.run)
            except Deadlock as error:
                outcome.violate("I14", str(error))
            except (StepLimit, TimeLimit) as error:
                outcome.violate("I15", f"{type(error).__name__}: {error}")
            except SimulationError:
                raise
            except Violation as error:
                outcome.violate(error.invariant, error.text)
            except Exception as error:  # noqa: BLE001 -- a process that ends by it is a finding
                outcome.violate("crash", f"{type(error).__name__}: {error}")
        outcome.digest = world.trace.digest
        judge(outcome)
        world.missed += driver.nemesis.missed()
        return outcome

    def _run_queue(self, queue: QueuePlan, choices: Choices, *, is_fenced: bool) -> Outcome:
        broken: Violation | None = None
        try:
            play = queue_consumers.run if queue.real else leased_queue.run
            plan: dict[str, Any] = {
                "workers": queue.workers,
                "jobs": queue.jobs,
                "losses": queue.losses,
            }
            if self.policy is not None:
                plan["policy"] = self.policy
            play(choices, fenced=is_fenced, **plan)
        except Violation as error:
            broken = error
        world = choices.world
        assert world is not None
        network = ClusterNetwork(world)
        outcome = Outcome(self, world, network, Cluster(world, network, self.cluster))
        outcome.digest = world.trace.digest
        if broken is not None:
            outcome.violate(broken.invariant, broken.text)
        return outcome
