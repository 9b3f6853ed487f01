"""A scenario: a cluster, its load, what breaks and when, and what must hold; and how it is played.

`load_scenario` (`scenario_file.py`) reads one from TOML; `Scenario.run` plays it on given choices
and judges it. Only what a run records can differ between two runs of one scenario and one list of
choices: nothing. Read next: `scenario_faults.py` (what can be done to a cluster), `checks/`.
"""

from __future__ import annotations

from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import attrs
import trio

from .catalogue.bugs import planted
from .checks import judge
from .checks.census import leftovers, overflows
from .checks.watches import stale_views
from .choices import Choices
from .cluster import Cluster, ClusterPlan
from .cluster_network import ClusterNetwork
from .cluster_rogues import Rogue
from .errors import Deadlock, SimulationError, StepLimit, TimeLimit, Violation
from .host import HostState
from .scenario_faults import Nemesis
from .scenarios.leased_queue import run
from .scheduler import Policy
from .world import World

if TYPE_CHECKING:
    from .scenario_faults import FaultPlan

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

STEP_S = 0.2
"""How often the driver looks whether what it waits for has come."""
SHUTDOWN_S = 45.0
"""Bound on the orderly end of a process: the sum of its steps' deadlines, and some."""


@attrs.frozen(kw_only=True)
class NetworkPlan:
    """The network as long as nothing is broken."""

    tear_one_in: int = 4
    short_one_in: int = 8
    window_bytes: int = 65_536
    connect_timeout_s: float = 10.0
    latency_s: float = 0.0005
    jitter_s: float = 0.0002


@attrs.frozen(kw_only=True)
class LinkPlan:
    """One direction, or both: `source` and `target` may hold `*`."""

    source: str
    target: str
    is_both_ways: bool = False
    latency_s: float | None = None
    jitter_s: float | None = None
    bytes_per_s: float | None = None
    """Bandwidth; 0 is without limit."""
    loss_one_in: int | None = None
    """One segment in so many is lost, and so late; 0 is none."""
    fin_delay_s: float | None = None
    """How long the end of a connection is held back: a peer that closes slowly."""


@attrs.frozen(kw_only=True)
class Limits:
    """When a run is given up, and the bounds it is held to, all in virtual seconds."""

    virtual_s: float = 600.0
    steps: int = 2_000_000
    end_s: float = 60.0
    """From the start of the load until every accepted request has ended (I15)."""
    idle_s: float = 5.0
    """From the end of a request at its client until every leg of it is idle (I4)."""
    settle_s: float = 40.0
    """After the last request, until nothing of any request is left (I5, I16)."""


@attrs.frozen(kw_only=True)
class Liveness:
    """At `at_s` a core is healed; what else is broken then stays so. Negative: never."""

    at_s: float = -1.0


@attrs.frozen(kw_only=True)
class Expect:
    """What the run must show beside the invariants."""

    invariants: tuple[str, ...] = ()
    """Those that are checked; empty means all."""
    outcomes: tuple[str, ...] = ()
    """The only ends a client may see; empty means any. A word ending in `*` is a beginning."""
    complete_min: int = 0
    """How many requests must be answered whole."""
    notes: tuple[str, ...] = ()
    """Kinds of notes that must occur, or nothing was tested."""
    never: tuple[str, ...] = ()
    """Kinds of notes that must not occur."""
    burst_note: str = ""
    burst_max: int = 0
    """Once a fault is over, at most so many notes of the kind come within `BURST_S`."""


@attrs.frozen(kw_only=True)
class QueuePlan:
    """The small leased queue in place of a cluster (see `scenarios/leased_queue.py`)."""

    workers: int = 2
    jobs: int = 1
    losses: bool = True


@attrs.frozen(kw_only=True)
class Twin:
    """The same scenario with a known mistake put back: some seed must show it."""

    bug: str
    finds: str
    """The invariant that is broken then."""
    seeds_max: int = 200


@attrs.frozen
class Breach:
    """One invariant that does not hold, when it was noticed, and what was seen."""

    invariant: str
    text: str
    at_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.invariant}: {self.text}"


@attrs.define(eq=False)
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
    policy: Policy = "batch"
    cluster: ClusterPlan = attrs.Factory(ClusterPlan)
    queue: QueuePlan | None = None
    """Instead of the cluster."""
    network: NetworkPlan = NetworkPlan()
    links: tuple[LinkPlan, ...] = ()
    rogues: tuple[Rogue, ...] = ()
    faults: tuple[FaultPlan, ...] = ()
    liveness: Liveness = Liveness()
    limits: Limits = Limits()
    expect: Expect = Expect()
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
            policy=self.policy,
            ambient="virtual",
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
        with planted(bug) if bug else nullcontext():
            try:
                world.run(_Play(self, outcome).run)
            except Deadlock as error:
                outcome.violate("I14", str(error))
            except (StepLimit, TimeLimit) as error:
                outcome.violate("I15", f"{type(error).__name__}: {error}")
            except SimulationError:
                raise
            except Exception as error:  # noqa: BLE001 -- a process that ends by it is a finding
                first = _single(error)
                if isinstance(first, Violation):
                    outcome.violate(first.invariant, first.text)
                else:
                    outcome.violate("crash", f"{type(first).__name__}: {first}")
        outcome.digest = world.trace.digest
        judge(outcome)
        return outcome

    def _run_queue(self, queue: QueuePlan, choices: Choices, *, is_fenced: bool) -> Outcome:
        broken: Violation | None = None
        try:
            run(choices, fenced=is_fenced, **attrs.asdict(queue))
        except* Violation as group:
            broken = _single(group)
        world = choices.world
        assert world is not None
        network = ClusterNetwork(world)
        outcome = Outcome(self, world, network, Cluster(world, network, self.cluster))
        outcome.digest = world.trace.digest
        if broken is not None:
            outcome.violate(broken.invariant, broken.text)
        return outcome


def _single(error: BaseException) -> Any:
    """The first error of a group of groups, which nurseries make."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class _Play:
    """The driver of one run."""

    def __init__(self, scenario: Scenario, outcome: Outcome) -> None:
        self.scenario, self.outcome = scenario, outcome
        self.world, self.cluster = outcome.world, outcome.cluster
        self.nemesis = Nemesis(outcome)

    async def run(self) -> None:
        scenario, outcome, world = self.scenario, self.outcome, self.world
        self._shape_links()
        await self.cluster.start()
        outcome.load_started_s = trio.current_time()
        world.note("load.begin")
        self.nemesis.arm()
        self.cluster.start_clients()
        for number, rogue in enumerate(scenario.rogues):
            world.boot(f"rogue{number}", rogue.run, self.cluster)
        if scenario.liveness.at_s >= 0:
            world.after(scenario.liveness.at_s, self.nemesis.heal_core)
        if not await self._wait(self._is_load_over, scenario.limits.end_s):
            self._tell_unended()
        outcome.load_ended_s = trio.current_time()
        world.note("load.end")
        await self.nemesis.wait_over()
        outcome.is_settled = await self._wait(
            lambda: not leftovers(outcome), scenario.limits.settle_s
        )
        outcome.leftovers = leftovers(outcome)
        if not await self._wait(self._are_workers_found, scenario.limits.settle_s):
            outcome.violate("expected", "a living worker is not in the store")
        world.note("settled", left=outcome.leftovers)
        if not outcome.breaches:
            await self._look_at_watches()
            await self._shut_down()

    def _shape_links(self) -> None:
        hosts = [*self.cluster.hosts, *(f"rogue{n}" for n in range(len(self.scenario.rogues)))]
        for plan in self.scenario.links:
            for a in hosts:
                for b in hosts:
                    forth = fnmatchcase(a, plan.source) and fnmatchcase(b, plan.target)
                    back = fnmatchcase(b, plan.source) and fnmatchcase(a, plan.target)
                    if a != b and (forth or (back and plan.is_both_ways)):
                        self._shape(self.outcome.network.link(a, b), plan)

    @staticmethod
    def _shape(link: Any, plan: LinkPlan) -> None:
        for field in ("latency_s", "jitter_s", "bytes_per_s", "loss_one_in", "fin_delay_s"):
            value = getattr(plan, field)
            if value is not None:
                setattr(link, field, value)

    async def _wait(self, condition: Any, bound_s: float) -> bool:
        """Poll: a crashed process can tell nobody, so there is no event to wait for."""
        with trio.move_on_after(bound_s):
            while not condition():
                self._look_at_bounds()
                await trio.sleep(STEP_S)
        return bool(condition())

    def _look_at_bounds(self) -> None:
        for text in overflows(self.outcome):
            if not any(v.text == text for v in self.outcome.breaches):
                self.outcome.violate("I12", text)

    def _is_load_over(self) -> bool:
        if self.scenario.liveness.at_s >= 0 and self.outcome.healed_s is None:
            return False
        names = [f"rogue{number}" for number in range(len(self.scenario.rogues))]
        return self.cluster.are_clients_done and not any(map(self._is_running, names))

    def _tell_unended(self) -> None:
        for record in self.cluster.open_requests:
            self.outcome.violate(
                "I15",
                f"request {record.name} has not ended {self.scenario.limits.end_s:g} s after the"
                f" load began\n{self.world.waiting()}",
            )
        if not self.cluster.open_requests:
            self.outcome.violate("I15", f"the clients are not done\n{self.world.waiting()}")

    def _are_workers_found(self) -> bool:
        """Whether every worker that lives, and can, is registered."""
        cluster = self.cluster
        held = cluster.store.values("instances/")
        for name in cluster.workers:
            process = cluster.processes[name]
            runtime, control = process.runtime, process.transports.control
            if not cluster.is_up(name) or process.told.is_set() or control is None:
                continue
            if not cluster.services.is_reachable(name):
                continue
            if runtime is None or not any(str(runtime.instance_id) in key for key in held):
                return False
        return True

    async def _look_at_watches(self) -> None:
        """I13 in the end: who believed every event of a watch knows what the store holds."""
        outcome = self.outcome
        await self._wait(lambda: not any(stale_views(outcome)), self.scenario.limits.settle_s)
        for text in stale_views(outcome):
            outcome.violate("I13", text)

    async def _shut_down(self) -> None:
        """Everything leaves in order; what does not within its bounds is a violation."""
        names = [
            name
            for name, process in self.cluster.processes.items()
            if self.cluster.is_up(name) and process.ready.is_set()
        ]
        for name in names:
            self.cluster.processes[name].told.set()
        if not await self._wait(lambda: not any(map(self._is_running, names)), SHUTDOWN_S):
            late = [name for name in names if self._is_running(name)]
            self.outcome.violate("I15", f"{late} did not shut down\n{self.world.waiting()}")

    def _is_running(self, name: str) -> bool:
        return self.world.host(name).state is HostState.UP
