"""I1 to I16 where prompts are computed elsewhere: whatever mix of faults strikes, all answers are right.

Blocks are few, clients leave early, and faults strike while blocks move, so that what a transfer may
still touch is wanted by somebody else. That this can fail is shown: the same runs meet planted bugs.
"""

from __future__ import annotations

import random
from typing import Literal

import attrs
import pytest

from tests.session.hypothesis_profile import IS_SWARM
from trinamo.sim import SeedChoices
from trinamo.sim.cluster.memory import MemoryPlan
from trinamo.sim.cluster.plans import FaultPlan
from trinamo.sim.scenario.file import parse_scenario
from trinamo.sim.scenario.run import run_scenario
from trinamo.sim.trial.scenario import Scenario

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
num_gpu_blocks = 30
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
[[workload]]
clients = 3
requests = 3
prompt_words = [12, 18]
output_tokens = [5, 15]
quit_after_s = 0.25
[limits]
end_s = 200.0
idle_s = 30.0
settle_s = 300.0
"""
MODES = {
    mode: parse_scenario(SCENARIO.format(mode=mode)) for mode in ("prefill_first", "decode_first")
}
SEEDS = random.SystemRandom().sample(range(2**32), 400) if IS_SWARM else range(1, 41)
"""One run each. Hypothesis draws too few plans that differ much to meet the planted bugs in so many."""
FAULTS = ("kill", "power_off", "pause", "stall_adapter", "stall_adapter", "cut", "reset")
BACKENDS: list[tuple[Literal["simulated", "tcp"], ...]]
BACKENDS = [("simulated", "tcp"), ("simulated", "tcp"), ("simulated",), ("tcp",)]


def fault(dice: random.Random, nth: int) -> FaultPlan:
    """One that strikes within 4 ms of the start of a transfer, of which a run has 5 to 50."""
    host = dice.choice(["prefill0", "prefill0", "worker0", "worker1"])
    return FaultPlan(
        do=dice.choice(FAULTS),
        on=host,
        to="worker*" if host == "prefill0" else "prefill0",
        lasts_s=dice.choice([0.5, 1.5, 2.5]),
        delay=(0.0, 0.004),
        after_note=f"kv.move#{nth}",
    )


def scenario_of(seed: int) -> Scenario:
    """Three faults, and the memory that they strike."""
    dice = random.Random(seed)
    scenario = MODES[dice.choice(sorted(MODES))]
    memory = MemoryPlan(
        backends=dice.choice(BACKENDS),
        is_fenced=dice.random() < 0.3,
        is_copied=dice.random() < 0.5,
        window=1,
    )
    strikes = [fault(dice, dice.randint(1, 8) + place * dice.randint(0, 6)) for place in range(3)]
    cluster = attrs.evolve(scenario.cluster, memory=memory)
    return attrs.evolve(scenario, cluster=cluster, faults=tuple(strikes))


def broken(seed: int, *, bug: str = "") -> list[str]:
    outcome = run_scenario(scenario_of(seed), SeedChoices(seed), bug=bug)
    return [str(violation) for violation in outcome.violations]


@pytest.mark.slow
def test_remote_prefills_survive_any_three_faults() -> None:
    """Every request ends in its bound and right; every block is free in the end, and had one user."""
    for seed in SEEDS:
        assert broken(seed) == [], f"seed {seed}: {scenario_of(seed)}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "rule"),
    [
        ("lost_peer_is_done", "I1"),
        ("withdrawal_frees_at_once", "I9"),
        ("transfers_hold_no_lease", "I9"),
    ],
)
def test_the_same_runs_find_a_planted_bug(bug: str, rule: str) -> None:
    assert any(
        text.startswith(f"{rule}: ") for seed in range(1, 41) for text in broken(seed, bug=bug)
    )
