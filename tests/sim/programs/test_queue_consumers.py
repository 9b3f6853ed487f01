"""Real consumers of a simulated queue: nothing done twice under faults; the planted S10 is found."""

from __future__ import annotations

import pytest

from trinamo.sim import ReplayChoices, SeedChoices
from trinamo.sim.explore import Scenario, run, swarm
from trinamo.sim.programs import queue_consumers

FENCED = Scenario("trinamo.sim.programs.queue_consumers")
UNFENCED = FENCED.changed(fenced=False)

pytestmark = pytest.mark.slow


def test_a_swarm_finds_nothing_where_the_queue_has_its_fence() -> None:
    assert swarm(FENCED, range(32)).failures == {}


def test_a_swarm_finds_acks_that_are_applied_twice_where_it_has_none() -> None:
    progress = swarm(UNFENCED, range(32))
    assert list(progress.failures) == ["I8: the ack of job job-# is applied twice"]


def test_a_run_is_replayed_step_by_step() -> None:
    first = queue_consumers.run(SeedChoices(3))
    again = queue_consumers.run(ReplayChoices(first.choices.values, 3))
    assert again.trace.digest == first.trace.digest
    assert run(FENCED, 3).finding is None
