"""I1 to I16 where prompts are computed elsewhere: whatever mix of faults strikes, all answers are right."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.session.hypothesis_profile import IS_SWARM
from trinamo.sim import ReplayChoices
from trinamo.sim.cluster.memory import MemoryPlan
from trinamo.sim.scenario.file import parse_scenario
from trinamo.sim.scenario.plans import FaultPlan
from trinamo.sim.scenario.run import run_scenario
from trinamo.sim.scenario.scenario import Scenario

SCENARIO = """
name = "drawn"
about = "Faults as hypothesis draws them."
[cluster]
prefills = 1
workers = 2
[cluster.config]
"control_plane.etcd.lease_ttl_s" = 2
"disaggregation.mode" = "{mode}"
"disaggregation.prefill_tokens_local_max" = 16
"disaggregation.queue_timeout_s" = 1.0
"disaggregation.prefill_timeout_s" = 2.0
"data_plane.transfer.attempt_timeout_s" = 0.5
"data_plane.transfer.settle_timeout_s" = 1.0
"data_plane.transfer.quarantine_after_s" = 1.0
[engine]
block_size = 8
num_gpu_blocks = 60
max_num_seqs = 12
max_num_batched_tokens = 24
[[workload]]
clients = 3
requests = 3
prompt_words = [12, 18]
output_tokens = [5, 15]
timeout_s = 20.0
[[workload]]
clients = 2
requests = 3
prompt_words = [12, 18]
output_tokens = [5, 15]
quit_after_s = 0.3
[limits]
end_s = 200.0
idle_s = 30.0
settle_s = 300.0
"""
MODES = {
    mode: parse_scenario(SCENARIO.format(mode=mode)) for mode in ("prefill_first", "decode_first")
}
TIMES = st.floats(0, 1, allow_nan=False).map(lambda time: round(time, 3))
WORDS = st.sampled_from(
    ["kill", "power_off", "pause", "isolate", "stall_adapter", "break_adapter", "cut", "reset"]
)


@st.composite
def faults(draw: st.DrawFn) -> FaultPlan:
    host = draw(st.sampled_from(["prefill0", "worker0"]))
    fault = FaultPlan(
        do=draw(WORDS),
        on=host,
        to="prefill0" if host == "worker0" else "worker*",
        lasts_s=draw(st.sampled_from([0.05, 0.5, 1.5, 8.0])),
        delay=draw(st.sampled_from([0.0, 0.001, 0.004])),
        at=draw(TIMES),
    )
    if draw(st.booleans()):
        return fault
    return attrs.evolve(fault, at=None, after_note=f"kv.move#{draw(st.integers(1, 6))}")


MEMORY = st.builds(
    MemoryPlan,
    backends=st.sampled_from([("simulated", "tcp"), ("simulated",), ("tcp",)]),
    is_fenced=st.booleans(),
    is_copied=st.booleans(),
    window=st.sampled_from([1, 4]),
)


@pytest.mark.slow
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not IS_SWARM,
)
@given(
    st.sampled_from(sorted(MODES)),
    MEMORY,
    st.lists(faults(), max_size=3),
    st.lists(st.integers(0, 3), max_size=20),
)
def test_remote_prefills_survive_any_three_faults(
    mode: str, memory: MemoryPlan, strikes: list[FaultPlan], values: list[int]
) -> None:
    """Every request ends in its bound and right; every block is free in the end, and had one user."""
    scenario: Scenario = MODES[mode]
    cluster = attrs.evolve(scenario.cluster, memory=memory)
    scenario = attrs.evolve(scenario, cluster=cluster, faults=tuple(strikes))
    outcome = run_scenario(scenario, ReplayChoices(values))
    assert [str(violation) for violation in outcome.violations] == []
    if not strikes:
        assert {record.outcome for record in outcome.records} <= {"complete", "quit"}
