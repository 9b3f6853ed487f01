from __future__ import annotations

from pathlib import Path

import pytest

import trinamo.sim.catalogue
from trinamo.sim import SeedChoices
from trinamo.sim.explore import Failure, load_failure, replay, run, save_failure, shrink, swarm
from trinamo.sim.scenario.play import play_of

CATALOGUE = Path(trinamo.sim.catalogue.__file__).parent


def test_a_scenario_file_is_explored_like_any_other() -> None:
    scenario = play_of(CATALOGUE / "s10_stale_ack.toml")
    assert swarm(scenario, range(20)).failures == {}


def test_a_failure_of_a_scenario_file_needs_no_other_file(tmp_path: Path) -> None:
    scenario = play_of(CATALOGUE / "s10_stale_ack.toml", bug="stale_ack")
    failing = next(found for seed in range(200) if (found := run(scenario, seed)).finding)
    shrunk = shrink(scenario, SeedChoices(failing.seed))
    assert shrunk.run.deviation_count == 1
    save_failure(Failure.of(shrunk.scenario, shrunk.run), tmp_path / "failure.json")
    assert replay(load_failure(tmp_path / "failure.json")).is_exact


def test_a_cluster_of_a_scenario_file_gives_one_digest_for_a_seed() -> None:
    scenario = play_of(CATALOGUE / "kill.toml")
    assert run(scenario, 3).digest == run(scenario, 3).digest != run(scenario, 4).digest


@pytest.mark.check
def test_the_faults_of_a_scenario_file_can_be_left_out() -> None:
    scenario = play_of(CATALOGUE / "storm.toml")
    assert len(scenario.parameters["faults"]) > 1
    calm = run(scenario.changed(faults=[]), 1)
    assert calm.finding is None
    assert calm.digest != run(scenario, 1).digest
