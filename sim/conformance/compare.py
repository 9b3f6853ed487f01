"""Whether the simulator tells the truth: one scenario on loopback sockets in real time, compared.

The same cluster, load and faults run against the kernel's TCP. Then each request's notes, times
aside, are compared with the simulated run of the same seed. Without faults they must be equal, token
by token. With faults it is chance which token a fault meets, so runs of tokens count as one, and
the sequence must be one that some simulated run shows, for any request of the same profile.

What cannot be done on loopback is refused by name: `refusals`. Read next: `world.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs

from ..cluster.cluster import Cluster
from ..cluster.outcome import Outcome
from ..cluster.plans import Scenario
from ..cluster.services import BROKER
from ..core.choices import SeedChoices
from ..core.trace import Row
from ..report.events import host_name, request_of
from ..scenario.driver import ClusterDriver
from ..scenario.run import run_scenario
from .services import LoopbackServices
from .world import LoopbackNetwork, LoopbackWorld

FAULTS: Final = ("kill", "stop", "boot", "reset", "compact", "lose_replies")
"""What can be done to one host of a process in real time."""
WHY_NOT: Final = {
    "power_off": "the kernel of a loopback peer always answers",
    "pause": "the hosts share one process, which cannot stop a part of itself",
    "isolate": "loopback cannot lose packets",
    "cut": "loopback cannot lose packets",
    "cut_one_way": "loopback cannot lose packets",
    "finish": "there is nobody in the middle of loopback to end a connection",
    "skew": "the hosts share one wall clock",
    "exhaust": "the hosts share one table of file descriptors",
}
TOLD: Final = ("index", "token", "tokens", "outcome", "state", "reason")
"""Fields of a note that must be equal; names of attempts and instances are drawn anew."""
COUNTED: Final = ("index", "token", "tokens")
EARLY: Final = (
    "quit_after", "quit_after_s", "stop_after", "kill_after", "drop_after", "cut_input_after"
)  # fmt: skip

LATENCIES_S: Final = (0.00005, 0.02)
"""About what loopback needs, with a wake-up of the other end; and where other processes have the cores."""
SLOWER: Final = 4.0

Entry = tuple[str, tuple[tuple[str, Any], ...]]
Shape = tuple[Entry, ...]
Shapes = dict[str, dict[str, Shape]]
"""By request, then by role: what was noted, in order."""


@attrs.frozen
class Strange:
    """A request whose notes on real sockets no simulated run shows."""

    request: str
    role: str
    real: Shape
    simulated: Shape
    """What the simulated run of the same seed has."""


@attrs.frozen
class Conformance:
    """What the comparison found; `is_exact` says whether every note had to be equal."""

    is_exact: bool
    requests: int
    same: int
    """As in the simulated run of the same seed."""
    elsewhere: int
    """As in another simulated run."""
    strange: list[Strange]
    missing: list[str]
    """Notes that the scenario expects and that did not occur on real sockets."""

    @property
    def conforms(self) -> bool:
        """Whether the simulator shows everything the kernel showed."""
        return not self.strange and not self.missing


def refusals(scenario: Scenario) -> list[str]:
    """Why this scenario cannot be played on loopback; empty if it can."""
    if scenario.queue is not None:
        return ["it has no cluster, and its messages travel on the simulator's own bus"]
    found = []
    if scenario.cluster.prefills:
        found.append("its prefill workers move KV blocks by adapters, which loopback has not")
    found += [
        f"fault {fault.do}: {WHY_NOT.get(fault.do, 'it is not known how to do it for real')}"
        for fault in scenario.faults
        if fault.do not in FAULTS
    ]
    if scenario.liveness.at_s >= 0:
        found.append("its liveness phase breaks links for good, and loopback cannot lose packets")
    if scenario.links:
        found.append("its links are shaped, and loopback has no latency to shape")
    if any(fault.on == BROKER for fault in scenario.faults):
        found.append("its faults strike the broker, which nobody is connected to on loopback")
    if any(profile.choices > 1 for profile in scenario.cluster.workload):
        found.append("its requests have several choices, which a worker takes turns with by chance")
    if any(fault.maybe for fault in scenario.faults):
        found.append("its faults strike by chance, so no two runs are the same play")
    return list(dict.fromkeys(found))


def conform(
    scenario: Scenario, *, seed: int = 0, seeds: Iterable[int] = range(40), timeout_s: float = 120.0
) -> Conformance:
    """Play for real, then simulated with `seed` and, if chance has a part, with `seeds`.

    Raises `ValueError` if it cannot be played on loopback, `trio.TooSlowError` after `timeout_s`
    real seconds, and whatever a process of the cluster raised.
    """
    if why := refusals(scenario):
        raise ValueError("; ".join(why))
    is_exact = _is_exact(scenario)
    rows = play_for_real(scenario, seed, timeout_s)
    real = shapes_of(rows, is_exact=is_exact)
    simulated = shapes_of(simulated_rows(scenario, seed), is_exact=is_exact)
    differing = [
        (request, role)
        for request in sorted({**real, **simulated})
        for role in sorted({**real.get(request, {}), **simulated.get(request, {})})
        if real.get(request, {}).get(role) != simulated.get(request, {}).get(role)
    ]
    told = {(role, real.get(request, {}).get(role, ())) for request, role in differing}
    possible: set[tuple[str, Shape]] = set()
    for each in () if is_exact else (seed, *seeds):
        if told <= possible:
            break
        possible |= possible_shapes(scenario, each)
    strange = [
        Strange(
            request,
            role,
            real.get(request, {}).get(role, ()),
            simulated.get(request, {}).get(role, ()),
        )
        for request, role in differing
        if (role, real.get(request, {}).get(role, ())) not in possible
    ]
    requests = {**real, **simulated}
    odd = {each.request for each in strange}
    other = {request for request, _ in differing} - odd
    kinds = {row.kind for row in rows}
    return Conformance(
        is_exact=is_exact,
        requests=len(requests),
        same=len(requests) - len(odd) - len(other),
        elsewhere=len(other),
        strange=strange,
        missing=[kind for kind in scenario.expect.notes if kind not in kinds],
    )


def play_for_real(scenario: Scenario, seed: int, timeout_s: float) -> Sequence[Row]:
    """The rows of one run on loopback sockets in real time."""
    world = LoopbackWorld(SeedChoices(seed), timeout_s=timeout_s)
    network = LoopbackNetwork(world)
    services = LoopbackServices(world, network)
    cluster = Cluster(world, network, scenario.cluster, services=services)
    outcome = Outcome(scenario, world, network, cluster)
    world.run(ClusterDriver(scenario, outcome).run)
    return world.trace.rows


def simulated_rows(scenario: Scenario, seed: int) -> Sequence[Row]:
    """The rows of one simulated run."""
    return run_scenario(scenario, SeedChoices(seed)).world.trace.rows


def _is_exact(scenario: Scenario) -> bool:
    """Whether nothing that depends on the moment has a part in it."""
    leaves = any(
        getattr(profile, name, -1) >= 0 for profile in scenario.cluster.workload for name in EARLY
    )
    return not (scenario.faults or scenario.byzantines or leaves)


def possible_shapes(scenario: Scenario, seed: int) -> set[tuple[str, Shape]]:
    """What one simulated run shows of each role, for any request, at one of six paces."""
    # Loopback is faster than the file's network, and a real engine slower than its cost model, which
    # computes in no time: a signal may overtake more. A process that waits for a core hears late, as
    # over a long link: the other end may have ended an answer of which tokens are still on the way.
    # So each seed is played at one of six paces.
    plan = scenario.cluster
    others = (attrs.evolve(scenario.network, latency_s=s, jitter_s=s) for s in LATENCIES_S)
    slow_engine = attrs.evolve(plan.engine, speedup_ratio=plan.engine.speedup_ratio / SLOWER)
    paces = [
        attrs.evolve(scenario, network=network, cluster=attrs.evolve(plan, engine=engine))
        for network in (scenario.network, *others)
        for engine in (plan.engine, slow_engine)
    ]
    return {
        (role, shape)
        for by_role in shapes_of(
            simulated_rows(paces[seed % len(paces)], seed), is_exact=False
        ).values()
        # A request may have left no trace with a role that it never reached.
        for role, shape in [
            *by_role.items(),
            *((role, ()) for role in ROLES if role not in by_role),
        ]
    }


ROLES: Final = ("client", "frontend", "worker")


def shapes_of(rows: Iterable[Row], *, is_exact: bool) -> Shapes:
    """Each request's notes by the role of the host, times aside.

    With `is_exact` all of them; else runs of a client's tokens as one, the first of an engine's, and
    no counts. A simulated engine computes in no time, so a kill never falls into the making of a
    token; on a real machine it does, and one token more is made, which nobody is given. It may be the
    last one: so of a killed request it does not count how its engine ended.
    """
    shapes: dict[str, dict[str, list[Entry]]] = {}
    for row in rows:
        request = request_of(row) if row.kind != "step" else ""
        if not request:
            continue
        role = host_name(row.host).rstrip("0123456789")
        told = tuple(
            (name, value)
            for name, value in row.fields
            if name in TOLD and (is_exact or name not in COUNTED)
        )
        entries = shapes.setdefault(request, {}).setdefault(role, [])
        if (
            not is_exact
            and row.kind == "engine.end"
            and any(e[0] == "cancel.kill" for e in entries)
        ):
            told = ()
        entry = row.kind, told
        is_repeated = entry in (entries if row.kind == "engine.token" else entries[-1:])
        if is_exact or not is_repeated:
            entries.append(entry)
    return {
        request: {role: tuple(entries) for role, entries in by_role.items()}
        for request, by_role in shapes.items()
    }
