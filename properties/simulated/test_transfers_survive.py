"""I9 on hosts that move KV blocks: whatever mix of faults strikes, no byte is wrong, no block lost."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.session.hypothesis_profile import IS_SWARM
from trinamo.runtime.kv.memory import KvLayout
from trinamo.sim import ReplayChoices
from trinamo.sim.scenario.plans import FaultPlan, Limits
from trinamo.sim.scenario.run import run_scenario
from trinamo.sim.scenario.scenario import Scenario
from trinamo.sim.transfers import TransferPlan

TIMES = st.floats(0, 0.2, allow_nan=False).map(lambda time: round(time, 3))
LASTING = st.sampled_from([0.05, 0.5, 1.5, 8.0])
HOSTS = st.sampled_from(["prefill0", "decode0", "store"])
WORDS = st.sampled_from(
    ["kill", "power_off", "pause", "isolate", "stall_adapter", "break_adapter", "cut", "reset"]
)


@st.composite
def faults(draw: st.DrawFn) -> FaultPlan:
    host = draw(HOSTS)
    fault = FaultPlan(
        do=draw(WORDS),
        on=host,
        to="prefill0" if host == "decode0" else "decode0",
        lasts_s=draw(LASTING),
        delay=draw(st.sampled_from([0.0, 0.001, 0.002])),
        at=draw(TIMES),
    )
    if draw(st.booleans()):
        return fault
    return attrs.evolve(fault, at=None, after_note=f"kv.move#{draw(st.integers(1, 6))}")


PLANS = st.builds(
    TransferPlan,
    move=st.sampled_from(["read", "write"]),
    backends=st.sampled_from([("simulated", "tcp"), ("simulated",), ("tcp",)]),
    layout=st.sampled_from(KvLayout),
    is_fenced=st.booleans(),
    is_copied=st.booleans(),
    window=st.sampled_from([1, 4]),
    slots=st.just(2),
    requests=st.just(3),
    pool_blocks=st.sampled_from([5, 12]),
    abort_one_in=st.sampled_from([0, 2]),
    attempt_s=st.just(0.5),
    deadline_s=st.just(2.0),
    drain_s=st.just(1.0),
)


@pytest.mark.slow
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not IS_SWARM,
)
@given(PLANS, st.lists(faults(), max_size=3), st.lists(st.integers(0, 3), max_size=20))
def test_transfers_survive_any_three_faults(
    plan: TransferPlan, strikes: list[FaultPlan], values: list[int]
) -> None:
    """Every request ends in its bound; every block is free in the end; no byte is wrong."""
    scenario = Scenario(
        name="drawn",
        about="Faults as hypothesis draws them.",
        transfers=plan,
        faults=tuple(strikes),
        limits=Limits(end_s=200.0, settle_s=300.0),
    )
    outcome = run_scenario(scenario, ReplayChoices(values))
    assert [str(violation) for violation in outcome.violations] == []
