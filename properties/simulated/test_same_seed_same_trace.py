"""A run is a function of its seed: same seed, same trace, in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

from hypothesis import given, settings, strategies as st

from tests.sim.programs import echo, response_stream
from trinamo.sim import Fault, Policy, ReplayChoices, SeedChoices, first_difference
from trinamo.sim.programs import leased_queue

POLICIES: tuple[Policy, ...] = get_args(Policy)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(POLICIES))
def test_one_seed_gives_one_trace(seed: int, policy: Policy) -> None:
    """Two runs of a seed in one process have equal rows, under every scheduling policy."""
    first = echo.run(SeedChoices(seed), policy=policy)
    again = echo.run(SeedChoices(seed), policy=policy)
    assert first_difference(first.world.trace, again.world.trace) == ""
    assert first.digest == again.digest


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(POLICIES))
def test_a_record_replays_the_run(seed: int, policy: Policy) -> None:
    """The seed with the recorded choices gives the trace of the run they were recorded in."""
    recorded = echo.run(SeedChoices(seed), policy=policy)
    values = recorded.world.choices.values
    replayed = echo.run(ReplayChoices(values, seed=seed), policy=policy)
    assert first_difference(recorded.world.trace, replayed.world.trace) == ""
    assert recorded.digest == replayed.digest
    assert replayed.world.choices.values == values


def test_different_seeds_give_different_traces() -> None:
    """Ten seeds explore ten runs."""
    assert len({echo.run(SeedChoices(seed)).digest for seed in range(10)}) == 10


def digests() -> list[str]:
    """Runs of each scenario, with faults, under every policy."""
    reset = response_stream.Fault("reset", on="stream.got", nth=7)
    plan = response_stream.Plan(streams=3, faults=(reset,))
    pause: Fault = {"do": "pause", "host": "worker0", "at_s": 0.1, "for_s": 1.5}
    off: Fault = {"do": "power_off", "host": "worker1", "at_s": 0.2, "for_s": 1.0}
    return [
        response_stream.run(plan, SeedChoices(1)).digest,
        *(echo.run(SeedChoices(1), policy=policy).digest for policy in POLICIES),
        *(
            leased_queue.run(SeedChoices(1), policy=policy, faults=[pause, off]).trace.digest
            for policy in POLICIES
        ),
    ]


def test_the_trace_is_the_same_in_other_processes_and_under_other_hash_seeds() -> None:
    """Neither the address layout nor PYTHONHASHSEED reaches a trace."""
    path = Path(__file__)
    program = f"import sys; sys.path.insert(0, {str(path.parent)!r}); import {path.stem} as test"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", f"{program}; print(*test.digests())"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("0", "1", "42")
    ]
    outputs = [child.communicate(timeout=60)[0].split() for child in children]
    assert outputs == [digests()] * 3


def test_the_faults_of_the_echo_scenario_are_felt() -> None:
    """The scenario above is worth comparing: some questions are answered, some are not."""
    troubled, calm = echo.run(SeedChoices(1)), echo.run(SeedChoices(1), faults=False)
    assert troubled.failures
    assert troubled.replies
    assert calm.failures == []
    assert len(set(calm.replies)) == 1
