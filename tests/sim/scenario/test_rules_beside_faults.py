"""Faults excuse what they can cause, and nothing else; and they end when everybody is told to leave."""

from __future__ import annotations

import pytest

from trinamo.sim import SeedChoices
from trinamo.sim.cluster.outcome import Outcome
from trinamo.sim.scenario.file import parse_scenario
from trinamo.sim.scenario.run import run_scenario

STOPPED = """
name = "stopped"
about = "Clients that want no more."
[[workload]]
via = "runtime"
clients = 2
requests = 2
output_tokens = [100, 150]
stop_after = 3
"""
RESTARTED = """
name = "restarted"
about = "A worker that is killed while it leaves, and started while everybody leaves."
[cluster]
config = { "control_plane.etcd.lease_ttl_s" = 2 }
[[workload]]
requests = 3
[liveness]
at_s = 3.0
[[fault]]
do = "kill"
on = "worker0"
at = 1.86
for = 1.86
[[fault]]
do = "stop"
on = "worker0"
at = 1.86
[[fault]]
do = "kill"
on = "worker1"
at = 1.86
for = 1.39
"""

LATE = '[[fault]]\ndo = "kill"\non = "worker1"\nat = 500.0\n'
BROKER = '[[fault]]\ndo = "pause"\non = "broker"\nat = 0.0\nfor = 5.0\n'
CUT = '[[fault]]\ndo = "pause"\non = "worker*"\nat = 0.0\nfor = 0.2\n'


def play(text: str, bug: str = "", seed: int = 1) -> Outcome:
    return run_scenario(parse_scenario(text), SeedChoices(seed), bug=bug)


@pytest.mark.parametrize("fault", ["", LATE, BROKER])
@pytest.mark.parametrize(
    ("bug", "words"),
    [("stop_unheard", "tokens after its Stop"), ("reasons_unsaid", "its worker heard")],
)
def test_a_fault_that_streams_do_not_feel_excuses_none_of_them(
    fault: str, bug: str, words: str
) -> None:
    broken = play(STOPPED + fault, bug).violations
    assert any(each.invariant == "I3" and words in each.text for each in broken)


def test_a_fault_that_streams_feel_excuses_them() -> None:
    assert play(STOPPED + CUT).violations == []


@pytest.mark.parametrize("seed", range(1, 5))
def test_nobody_is_started_once_everybody_was_told_to_leave(seed: int) -> None:
    assert [str(each) for each in play(RESTARTED, seed=seed).violations] == []
