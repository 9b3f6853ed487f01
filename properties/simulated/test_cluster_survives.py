"""I1 to I16 on whole clusters: whatever mix of faults strikes, the invariants hold."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.session.hypothesis_profile import IS_SWARM
from trinamo.runtime.caller.router import Router
from trinamo.runtime.errors import OverloadedError
from trinamo.sim import Policy, ReplayChoices
from trinamo.sim.scenario.file import parse_scenario
from trinamo.sim.scenario.plans import FaultPlan
from trinamo.sim.scenario.run import run_scenario
from trinamo.sim.scenario.scenario import Scenario

SCENARIO = parse_scenario(
    """
    name = "drawn"
    about = "Faults as hypothesis draws them."
    [cluster]
    config = { "control_plane.etcd.lease_ttl_s" = 2 }
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
)
TIMES = st.floats(0, 2, allow_nan=False).map(lambda time: round(time, 2))
WORKERS = st.sampled_from(["worker0", "worker1"])


def struck(do: str, **more: st.SearchStrategy[str]) -> st.SearchStrategy[FaultPlan]:
    return st.builds(FaultPlan, do=st.just(do), at=TIMES, lasts_s=TIMES, **more)


FAULTS = st.one_of(
    struck("kill", on=st.sampled_from(["worker0", "worker1", "store"])),
    struck("pause", on=WORKERS),
    struck("power_off", on=WORKERS),
    struck("isolate", on=WORKERS),
    struck("stop", on=WORKERS),
    struck("cut", on=WORKERS, to=st.sampled_from(["frontend0", "store"])),
    struck("cut_one_way", on=WORKERS, to=st.just("frontend0")),
    struck("reset", on=WORKERS, to=st.just("frontend0")),
)


@pytest.mark.slow
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not IS_SWARM,
)
@given(
    st.lists(FAULTS, max_size=3),
    st.lists(st.integers(0, 3), max_size=20),
    st.sampled_from(["batch", "step", "pct"]),
)
def test_a_cluster_survives_any_three_faults(
    plan: list[FaultPlan], values: list[int], policy: Policy
) -> None:
    """Every request has one right end within its bound, and nothing of it is left behind.

    What begins when a part of the cluster is whole again is answered whole; without faults, all is.
    """
    survive(plan, values, policy)


def survive(plan: list[FaultPlan], values: list[int], policy: Policy = "batch") -> None:
    scenario: Scenario = attrs.evolve(SCENARIO, faults=tuple(plan), policy=policy)
    outcome = run_scenario(scenario, ReplayChoices(values))
    assert [str(violation) for violation in outcome.violations] == []
    ends = [record.outcome for record in outcome.records]
    assert len(ends) == 12
    assert plan or ends == ["complete"] * len(ends)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [[], [FaultPlan(do="kill", on="worker0", at=0.5, lasts_s=1.0)]])
def test_a_router_that_always_refuses_is_found_out(
    plan: list[FaultPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **_more: object) -> None:
        raise OverloadedError("not now")

    monkeypatch.setattr(Router, "choose", refuses)
    with pytest.raises(AssertionError, match="long after a core was healed"):
        survive(plan, [])
