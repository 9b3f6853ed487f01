"""I1 to I16 under any mix of settings: nothing befalls the cluster, so what breaks is where settings meet.

What is drawn: the policy, who computes prompts, what carries requests and streams, whether the planes
are sealed, the bounds of frontends, workers and engines, and how clients ask. Bounds that are small let
requests be refused, which is an answer; none may be lost, cut or left behind.
"""

from __future__ import annotations

import json
from typing import Any, Final

import attrs
import pytest
from hypothesis import given, strategies as st

from properties.simulated.test_cluster_survives import (
    DECISIONS_MAX,
    POLICIES,
    STREAMS,
    examples,
    played,
)
from trinamo.sim import Choices
from trinamo.sim.cluster.plans import Scenario
from trinamo.sim.cluster.workload import COMPLETE
from trinamo.sim.scenario.file import parse_scenario
from trinamo.sim.strategies import choices, schedules

QUIET = """
name = "drawn"
about = "Settings as hypothesis draws them."
[cluster]
workers = {workers}
frontends = {frontends}
prefills = {prefills}
[cluster.config]
{config}
[engine]
block_size = 8
num_gpu_blocks = {blocks}
max_num_seqs = {sequences}
{load}
[limits]
end_s = 120.0
idle_s = 30.0
settle_s = 200.0
"""
LOAD = """
[[workload]]
clients = {clients}
requests = 3
prompt_words = [4, 18]
output_tokens = [1, 20]
{way}
"""
WAYS = ["", 'via = "runtime"', "stream = false", "choices = 2", "quit_after_s = 0.2"]
SETTINGS: Final[dict[str, list[Any]]] = {
    "router.attempts_max": [1, 2],
    "router.kv.temperature": [0.0, 0.5],
    "router.kv.overlap_credit_decay": [0.0, 0.5],
    "router.kv.events": [True, False],
    "data_plane.requests": ["tcp", "nats"],
    "security.secret_file": ["sealed"],
    "disaggregation.prefill_tokens_local_max": [0, 16],
    "worker.requests_max": [1, 2, 3],
    "worker.waiting_tokens_max": [40, 100],
    "http.requests_max": [2, 4],
    "http.queue_max": [0, 2],
    "http.on_disconnect": ["kill", "stop"],
}
ENDS: Final = {COMPLETE, "quit", "overloaded", "error 503"}


@st.composite
def configured(draw: st.DrawFn) -> Scenario:
    """A cluster as somebody may run it, and clients of one or two kinds."""
    mode = draw(st.sampled_from(["", "prefill_first", "decode_first"]))
    names = sorted(draw(st.sets(st.sampled_from(sorted(SETTINGS)), max_size=6)))
    config = {name: draw(st.sampled_from(SETTINGS[name])) for name in names}
    config["router.policy"] = draw(st.sampled_from([*POLICIES, "kv"]))
    if mode:
        config["disaggregation.mode"] = mode
    loads = draw(
        st.lists(st.tuples(st.integers(1, 4), st.sampled_from(WAYS)), min_size=1, max_size=2)
    )
    text = QUIET.format(
        workers=draw(st.integers(1, 3)),
        frontends=draw(st.integers(1, 2)),
        prefills=draw(st.integers(1, 2)) if mode else 0,
        config="\n".join(f'"{name}" = {json.dumps(value)}' for name, value in config.items()),
        blocks=draw(st.sampled_from([40, 200])),
        sequences=draw(st.sampled_from([2, 12])),
        load="".join(LOAD.format(clients=clients, way=way) for clients, way in loads),
    )
    policy = draw(schedules(("batch", "step", "pct")))
    return attrs.evolve(parse_scenario(text), policy=policy).on(draw(STREAMS))


@pytest.mark.check
@examples(10)
@given(configured(), choices(decisions_max=DECISIONS_MAX))
def test_no_mix_of_settings_loses_a_request(scenario: Scenario, choices: Choices) -> None:
    """Each ends in its bound, right or refused for want of room; nothing of it is left behind."""
    ends = {record.outcome for record in played(scenario, choices).cluster.records}
    assert ends <= ENDS
