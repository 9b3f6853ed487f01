"""I1 to I16 on whole clusters: whatever mix of faults strikes, the invariants hold, and promises too.

What is drawn: the cluster, its network and its load, the faults, every decision of the run and the
order of steps. Two properties promise more than the invariants: failover loses no request, and who
leaves is heard of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from trinamo.runtime.caller.router import Router
from trinamo.runtime.errors import OverloadedError
from trinamo.sim import Choices, ReplayChoices, Violation
from trinamo.sim.cluster.outcome import Outcome
from trinamo.sim.cluster.plans import FaultPlan, NetworkPlan, Scenario
from trinamo.sim.cluster.workload import COMPLETE
from trinamo.sim.scenario.file import parse_scenario
from trinamo.sim.scenario.run import run_scenario
from trinamo.sim.strategies import choices, schedules

HEALED = """
name = "drawn"
about = "Faults as hypothesis draws them."
[cluster]
workers = {workers}
[cluster.config]
"control_plane.etcd.lease_ttl_s" = 2
"router.policy" = "{policy}"
[[workload]]
clients = 2
requests = 3
timeout_s = 20.0
[[workload]]
via = "runtime"
requests = 2
timeout_s = 20.0
[[workload]]
requests = 2
start_s = 13.0
[[workload]]
via = "runtime"
requests = 2
start_s = 13.0
[liveness]
at_s = 3.0
whole_after_s = 10.0
[limits]
idle_s = 20.0
"""
FAILOVER = """
name = "failover"
about = "Of two workers one may do what it likes: every request is answered whole."
[cluster.config]
"control_plane.etcd.lease_ttl_s" = 2
"router.policy" = "{policy}"
[engine]
speedup_ratio = 0.5
[[workload]]
clients = {workers}
requests = 4
output_tokens = [10, 60]
pause_s = [0.0, 0.3]
[limits]
idle_s = 30.0
settle_s = 60.0
"""
LEFT = """
name = "left"
about = "Clients that leave, stop or kill at any moment."
[cluster]
workers = {workers}
[cluster.config]
"router.policy" = "{policy}"
"worker.stop_grace_s" = 0.5
[engine]
speedup_ratio = 0.3
"""
LEAVES = """
[[workload]]
via = "{via}"
output_tokens = [150, 200]
requests = 2
{moment}
"""
GRACE_S = 0.5
POLICIES = ["round_robin", "random", "least_loaded", "power_of_two", "kv"]
ROUTERS = st.sampled_from(POLICIES)
TIMES = st.integers(0, 200).map(lambda time: time / 100)
NETWORKS = st.builds(
    NetworkPlan,
    tear_one_in=st.sampled_from([0, 4]),
    short_one_in=st.sampled_from([0, 8]),
    window_bytes=st.sampled_from([65_536, 1024]),
    jitter_s=st.sampled_from([0.0, 0.0002, 0.01]),
)
STREAMS = st.sampled_from(["multiplexed", "dedicated"])
SCHEDULES = schedules(("batch", "step", "pct"))
DECISIONS_MAX = 1024


def workers_of(count: int) -> list[str]:
    return [f"worker{number}" for number in range(count)]


def faults_on(workers: list[str]) -> st.SearchStrategy[FaultPlan]:
    """One that strikes one of these workers or a link of it."""
    on = st.sampled_from(workers)

    def struck(do: str, **more: st.SearchStrategy[str]) -> st.SearchStrategy[FaultPlan]:
        return st.builds(FaultPlan, do=st.just(do), at=TIMES, lasts_s=TIMES, on=on, **more)

    return st.one_of(
        *(struck(do) for do in ("kill", "pause", "power_off", "isolate", "stop")),
        struck("cut", to=st.sampled_from(["frontend0", "store"])),
        *(struck(do, to=st.just("frontend0")) for do in ("cut_one_way", "reset")),
    )


STORE_KILLED = st.builds(
    FaultPlan, do=st.just("kill"), at=TIMES, lasts_s=TIMES, on=st.just("store")
)


@st.composite
def drawn(draw: st.DrawFn, text: str, *, workers: st.SearchStrategy[int]) -> Scenario:
    """The cluster of this text, with what the text leaves open."""
    made = parse_scenario(text.format(workers=draw(workers), policy=draw(ROUTERS)))
    made = attrs.evolve(made, network=draw(NETWORKS), policy=draw(SCHEDULES))
    return made.on(draw(STREAMS))


@st.composite
def healed(draw: st.DrawFn) -> Scenario:
    """One to three workers, and up to three faults of them or the store."""
    made = draw(drawn(HEALED, workers=st.integers(1, 3)))
    faults = faults_on(workers_of(made.cluster.workers)) | STORE_KILLED
    return attrs.evolve(made, faults=tuple(draw(st.lists(faults, max_size=3))))


@st.composite
def failovers(draw: st.DrawFn) -> Scenario:
    """Two workers, and up to three faults that all strike one of them, or its links."""
    made = draw(drawn(FAILOVER, workers=st.integers(2, 4)))
    worker = draw(st.sampled_from(workers_of(2)))
    faults = draw(st.lists(faults_on([worker]), min_size=1, max_size=3))
    return attrs.evolve(made, faults=tuple(faults))


@st.composite
def departures(draw: st.DrawFn) -> Scenario:
    """Two to four clients, each of which wants no more at a moment of its own."""
    tokens = st.integers(1, 40)
    moments = st.one_of(
        st.tuples(st.just("http"), tokens.map("quit_after = {}".format)),
        st.tuples(st.just("http"), TIMES.map("quit_after_s = {}".format)),
        st.tuples(st.just("runtime"), tokens.map("stop_after = {}".format)),
        st.tuples(st.just("runtime"), tokens.map("stop_after = {}\nis_deaf = true".format)),
        st.tuples(st.just("runtime"), tokens.map("kill_after = {}".format)),
        st.tuples(st.just("runtime"), tokens.map("drop_after = {}".format)),
    )
    clients = draw(st.lists(moments, min_size=2, max_size=4))
    load = "".join(LEAVES.format(via=via, moment=moment) for via, moment in clients)
    return draw(drawn(LEFT + load, workers=st.integers(1, 2)))


def examples(count: int) -> settings:
    too_much = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    return settings(max_examples=count, deadline=None, suppress_health_check=too_much)


def played(scenario: Scenario, choices: Choices) -> Outcome:
    """The run, in which no rule is broken."""
    outcome = run_scenario(scenario, choices)
    if outcome.violations:
        raise Violation(outcome.violations[0].invariant, "\n".join(map(str, outcome.violations)))
    return outcome


@examples(6)
@given(healed(), choices(decisions_max=DECISIONS_MAX))
def test_a_cluster_survives_any_three_faults(scenario: Scenario, choices: Choices) -> None:
    """Every request has one right end within its bound, and nothing of it is left behind.

    What begins when a part of the cluster is whole again is answered whole; without faults, all is.
    """
    survive(scenario, choices)


def survive(scenario: Scenario, choices: Choices) -> None:
    ends = [record.outcome for record in played(scenario, choices).cluster.records]
    assert len(ends) == 12
    assert scenario.faults or ends == [COMPLETE] * len(ends)


@examples(6)
@given(failovers(), choices(decisions_max=DECISIONS_MAX))
def test_whatever_befalls_one_worker_of_two_every_request_is_answered_whole(
    scenario: Scenario, choices: Choices
) -> None:
    """Failover: the other worker takes up what the first one began, or never began."""
    outcome = played(scenario, choices)
    incomplete = {
        record.name: record.outcome
        for record in outcome.cluster.records
        if record.outcome != COMPLETE
    }
    assert incomplete == {}
    assert list(asked_on(outcome)) == []
    assert len(outcome.cluster.records) == 4 * len(outcome.cluster.clients)


def asked_on(outcome: Outcome) -> Iterator[str]:
    """Instances that lost an answer, and that others are sent to nevertheless."""
    passed_over: set[str] = set()
    lost: dict[str, float] = {}
    leaves = {fault.on for fault in outcome.scenario.faults if fault.do == "stop"}
    for row in outcome.told:
        if row.kind in ("router.inhibit", "instance.leave", "instance.stale"):
            passed_over.add(row.field("instance"))
        elif row.kind == "migration" and not leaves:
            # Who hands its answers over is at no fault.
            lost.setdefault(row.field("instance"), row.time_s)
    yield from sorted(set(lost) - passed_over)


@examples(6)
@given(departures(), choices(decisions_max=DECISIONS_MAX))
def test_who_leaves_or_stops_is_heard_of_at_once_and_with_the_reason(
    scenario: Scenario, choices: Choices
) -> None:
    """Every leg of the request is idle within the bound (I4), and each worker knows why (I3)."""
    outcome = played(scenario, choices)
    told = {row.field("request") for row in outcome.world.trace.of_kind("engine.stopped")}
    told |= {row.field("request") for row in outcome.world.trace.of_kind("engine.killed")}
    since_s = {
        row.field("attempt"): row.time_s for row in outcome.world.trace.of_kind("engine.stopped")
    }
    for row in outcome.world.trace.of_kind("engine.end"):
        # Whoever hears no Stop is killed when its grace is over.
        assert row.time_s <= since_s.get(row.field("attempt"), math.inf) + GRACE_S + 0.1
    begun = {row.field("request") for row in outcome.world.trace.of_kind("engine.begin")}
    assert begun - told == set()
    assert begun or all(record.profile.quit_after_s >= 0 for record in outcome.cluster.records)


@pytest.mark.parametrize("plan", [[], [FaultPlan(do="kill", on="worker0", at=0.5, lasts_s=1.0)]])
def test_a_router_that_always_refuses_is_found_out(
    plan: list[FaultPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **_more: object) -> None:
        raise OverloadedError("not now")

    monkeypatch.setattr(Router, "choose", refuses)
    scenario = parse_scenario(HEALED.format(workers=2, policy="round_robin"))
    with pytest.raises(Violation, match="long after a core was healed"):
        survive(attrs.evolve(scenario, faults=tuple(plan)), ReplayChoices([]))
