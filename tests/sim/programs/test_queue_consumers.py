"""Real consumers of a simulated queue: nothing done twice under faults; the planted S10 is found."""

from __future__ import annotations

import pytest

from trinamo.sim import ReplayChoices, SeedChoices
from trinamo.sim.catalogue import scenario_paths
from trinamo.sim.explore import Scenario, run, swarm
from trinamo.sim.programs import queue_consumers
from trinamo.sim.scenario.play import play_of

CONSUMERS = Scenario("trinamo.sim.programs.queue_consumers")

pytestmark = pytest.mark.slow


def test_a_swarm_finds_nothing() -> None:
    assert swarm(CONSUMERS, range(32)).failures == {}


@pytest.mark.parametrize(
    ("bug", "finding"),
    [
        # Twice acknowledged, or worked on after its end: which of them shows first is the seeds'.
        ("stale_ack", "I8: "),
        ("lost_job_goes_on", "I8: attempt # of job job-# outlives its lease"),
        ("done_is_unsaid", "I8: job job-# has two effects, though the first could be told"),
    ],
)
def test_a_swarm_finds_what_happens_twice(bug: str, finding: str) -> None:
    path = next(path for path in scenario_paths() if path.stem == "s10_queue_consumers")
    found = swarm(play_of(path, bug=bug), range(64)).failures
    assert any(key.startswith(finding) for key in found)


def test_a_run_is_replayed_step_by_step() -> None:
    first = queue_consumers.run(SeedChoices(3))
    again = queue_consumers.run(ReplayChoices(first.choices.values, 3))
    assert again.trace.digest == first.trace.digest
    assert run(CONSUMERS, 3).finding is None
