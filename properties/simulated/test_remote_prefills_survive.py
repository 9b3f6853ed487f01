"""I1 to I16 where prompts are computed elsewhere: whatever mix of faults strikes, all answers are right.

Blocks are few, clients leave early, and faults strike while blocks move, so that what a transfer may
still touch is wanted by somebody else. Faults of one worker of each role promise more: the other of its
role answers for it, so every request is whole. That this can fail is shown.
"""

from __future__ import annotations

import attrs
import pytest
from hypothesis import Phase, given, settings, strategies as st

from properties.simulated.test_cluster_survives import DECISIONS_MAX, STREAMS, examples, played
from trinamo.sim import Choices
from trinamo.sim.cluster.memory import MemoryPlan
from trinamo.sim.cluster.outcome import Outcome
from trinamo.sim.cluster.plans import FaultPlan, Scenario
from trinamo.sim.cluster.workload import COMPLETE
from trinamo.sim.scenario.file import parse_scenario
from trinamo.sim.scenario.run import run_scenario
from trinamo.sim.strategies import choices, schedules

SCENARIO = """
name = "drawn"
about = "Faults as hypothesis draws them."
[cluster]
prefills = {prefills}
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
num_gpu_blocks = {blocks}
max_num_seqs = 12
max_num_batched_tokens = 24
speedup_ratio = 2.0
[[workload]]
clients = 4
requests = 3
prompt_words = [12, 18]
output_tokens = [5, 15]
pause_s = [0.0, 0.1]
timeout_s = 20.0
[limits]
end_s = 200.0
idle_s = 30.0
settle_s = 300.0
"""
LEAVING = """
[[workload]]
clients = 3
requests = 3
prompt_words = [12, 18]
output_tokens = [5, 15]
quit_after_s = 0.25
"""
MODES = st.sampled_from(["prefill_first", "decode_first"])
BACKENDS = st.sampled_from([("simulated", "tcp"), ("simulated",), ("tcp",)])
MEMORY = st.builds(
    MemoryPlan,
    backends=BACKENDS,
    is_fenced=st.sampled_from([False, False, True]),
    is_copied=st.booleans(),
    window=st.just(1),
)
ALONE = MEMORY.filter(lambda memory: len(memory.backends) == 1)
"""No other backend moves the blocks when one has lost its peer."""
UNFENCED = st.just(MemoryPlan(is_fenced=False, window=1))
"""What is withdrawn may still be written."""


@st.composite
def faults(draw: st.DrawFn, hosts: list[str]) -> FaultPlan:
    """One that strikes one of these, or its links, within 4 ms of the start of a transfer."""
    host = draw(st.sampled_from(hosts))
    do = draw(
        st.sampled_from(
            ["kill", "power_off", "pause", "stall_adapter", "stall_adapter", "cut", "reset"]
        )
    )
    return FaultPlan(
        do=do,
        on=host,
        to="worker*" if host.startswith("prefill") else "prefill*",
        lasts_s=draw(st.sampled_from([0.5, 1.5, 2.5])),
        after_note=f"kv.move#{draw(st.integers(1, 15))}",
        delay=draw(st.integers(0, 8)) / 2000,
    )


@st.composite
def crowded(
    draw: st.DrawFn,
    modes: st.SearchStrategy[str] = MODES,
    memory: st.SearchStrategy[MemoryPlan] = MEMORY,
) -> Scenario:
    """So few blocks that what one request leaves is the next one's at once."""
    text = (SCENARIO + LEAVING).format(mode=draw(modes), prefills=1, blocks=30)
    return draw(struck(text, ["prefill0", "prefill0", "worker0", "worker1"], draw(memory)))


@st.composite
def spared(draw: st.DrawFn) -> Scenario:
    """One worker of each role that nothing befalls, and blocks enough for all that is asked."""
    text = SCENARIO.format(mode=draw(MODES), prefills=2, blocks=96)
    return draw(struck(text, ["prefill0", "worker0"], draw(MEMORY)))


@st.composite
def struck(draw: st.DrawFn, text: str, hosts: list[str], memory: MemoryPlan) -> Scenario:
    """This cluster, with two or three faults of these hosts."""
    made = parse_scenario(text)
    cluster = attrs.evolve(made.cluster, memory=memory)
    strikes = tuple(draw(st.lists(faults(hosts), min_size=2, max_size=3)))
    policy = draw(schedules(("batch", "batch", "step", "pct")))
    return attrs.evolve(made, cluster=cluster, faults=strikes, policy=policy).on(draw(STREAMS))


@examples(6)
@given(crowded(), choices(decisions_max=DECISIONS_MAX))
def test_remote_prefills_survive_any_three_faults(scenario: Scenario, choices: Choices) -> None:
    """Every request ends in its bound and right; every block is free in the end, and had one user."""
    assert len(played(scenario, choices).cluster.records) == 21


@pytest.mark.check
@examples(5)
@given(spared(), choices(decisions_max=DECISIONS_MAX))
def test_every_request_is_whole_while_one_worker_of_each_role_stays(
    scenario: Scenario, choices: Choices
) -> None:
    """Whatever befalls the others: a prompt is computed elsewhere, or where it is answered."""
    assert incomplete(played(scenario, choices)) == {}


def incomplete(outcome: Outcome) -> dict[str, str]:
    return {each.name: each.outcome for each in outcome.cluster.records if each.outcome != COMPLETE}


@pytest.mark.parametrize(
    ("drawn", "bug", "rule"),
    [
        # Scenarios of the catalogue show these three as well.
        pytest.param(
            crowded(st.just("prefill_first"), ALONE),
            *("lost_peer_is_done", "I1"),
            marks=pytest.mark.check,
        ),
        pytest.param(
            crowded(st.just("decode_first"), UNFENCED),
            *("withdrawal_frees_at_once", "I9"),
            marks=pytest.mark.check,
        ),
        pytest.param(crowded(), *("transfers_hold_no_lease", "I9"), marks=pytest.mark.check),
        (spared(), "lost_prefill_fails_the_request", ""),
    ],
)
def test_a_planted_bug_is_found(drawn: st.SearchStrategy[Scenario], bug: str, rule: str) -> None:
    """Each breaks its rule, or leaves a request without its answer."""

    @settings(examples(80), phases=[Phase.generate], database=None)
    @given(drawn, choices(decisions_max=DECISIONS_MAX))
    def holds(scenario: Scenario, choices: Choices) -> None:
        outcome = run_scenario(scenario, choices, bug=bug)
        assert rule not in {violation.invariant for violation in outcome.violations}
        assert rule or incomplete(outcome) == {}

    with pytest.raises((AssertionError, ExceptionGroup)):
        holds()
