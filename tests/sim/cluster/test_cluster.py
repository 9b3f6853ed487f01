"""A whole cluster in one world: real frontends, workers and clients, and what faults do to them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trinamo.sim import SeedChoices
from trinamo.sim.cluster.outcome import Outcome
from trinamo.sim.scenario.file import parse_scenario
from trinamo.sim.scenario.run import run_scenario

HEAD = 'name = "a"\nabout = "b"\n'
MIXED = "[[workload]]\nclients = 2\nrequests = 2\n[[workload]]\nvia = 'runtime'\n[[workload]]\nstream = false\n"


def play(text: str, seed: int = 1) -> Outcome:
    return run_scenario(parse_scenario(HEAD + text), SeedChoices(seed))


def outcomes(outcome: Outcome) -> list[str]:
    return [record.outcome for record in outcome.cluster.records]


def test_every_kind_of_client_gets_the_right_answer() -> None:
    outcome = play(MIXED)
    assert outcomes(outcome) == ["complete"] * 6
    assert all(record.text == record.expected for record in outcome.cluster.records)
    assert outcome.violations == []
    assert outcome.is_settled


REMOTE = (
    '[cluster]\nprefills = 1\n[cluster.config]\n"disaggregation.prefill_tokens_local_max" = 16\n'
    "[engine]\nblock_size = 8\nnum_gpu_blocks = 60\nmax_num_seqs = 12\nmax_num_batched_tokens = 24\n"
    "[[workload]]\nrequests = 2\nprompt_words = [12, 18]\n"
)


@pytest.mark.parametrize("backend", ["simulated", "tcp"])
def test_a_prompt_that_is_computed_elsewhere_comes_by_every_backend(backend: str) -> None:
    outcome = play(f'{REMOTE}[memory]\nbackends = ["{backend}"]\n')
    assert outcomes(outcome) == ["complete"] * 2
    assert outcome.violations == []
    moves = outcome.world.trace.of_kind("kv.move")
    assert {row.field("backend") for row in moves} == {backend}


def test_the_digest_covers_the_bytes_of_blocks_that_no_process_sends() -> None:
    blocks = play(f'{REMOTE}[memory]\nbackends = ["simulated"]\n').world.trace.of_kind("block")
    assert len({row.field("crc") for row in blocks}) > 1


def test_everything_leaves_in_order_at_the_end() -> None:
    outcome = play(MIXED)
    kinds = [row.kind for row in outcome.world.trace.rows]
    assert kinds.count("worker.left") == 2
    assert kinds.count("frontend.left") == 1
    assert outcome.cluster.store.holders() == {}


@pytest.mark.check
def test_a_run_is_the_same_in_processes_with_other_hash_seeds() -> None:
    program = (
        "import logging; logging.disable(50)\n"
        "from trinamo.sim import SeedChoices\n"
        "from trinamo.sim.catalogue import FOLDER\n"
        "from trinamo.sim.scenario.file import load_scenario\n"
        "from trinamo.sim.scenario.run import run_scenario\n"
        "print(run_scenario(load_scenario(FOLDER / 'storm.toml'), SeedChoices(7)).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "42")
    }
    assert len(digests) == 1


def test_a_killed_and_restarted_worker_is_a_new_instance() -> None:
    outcome = play(
        "[[workload]]\nrequests = 6\npause_s = [0.1, 0.3]\n"
        '[[fault]]\ndo = "kill"\non = "worker0"\nat = 0.1\nfor = 0.5'
    )
    served = outcome.world.trace.of_kind("worker.serve")
    assert sorted(row.host for row in served) == ["worker0.1", "worker0.2", "worker1.1"]
    assert len({row.field("instance") for row in served}) == 3
    assert outcome.violations == []


def test_after_the_faulty_phase_a_core_is_healed_and_the_rest_stays_broken() -> None:
    outcome = play(
        "[[workload]]\nclients = 2\nrequests = 4\npause_s = [0.2, 0.5]\n"
        '[[fault]]\ndo = "pause"\non = "worker0"\nat = 0.1\nfor = 60\n'
        '[[fault]]\ndo = "pause"\non = "worker1"\nat = 0.1\nfor = 60\n'
        "[liveness]\nat_s = 1.0\n[limits]\nidle_s = 30"
    )
    assert outcome.healed_s is not None
    worker = next(name for name in outcome.core if name.startswith("worker"))
    other = ({"worker0", "worker1"} - {worker}).pop()
    assert not outcome.cluster.is_up(other)
    assert not outcome.network.links.passes(other, "frontend0")
    assert not outcome.network.links.passes("store", other)
    assert "complete" in outcomes(outcome)
    assert outcome.violations == []


def test_store_writes_that_seem_to_fail_are_survived() -> None:
    outcome = play(
        '[cluster]\nconfig = { "control_plane.etcd.lease_ttl_s" = 2 }\n'
        "[[workload]]\nrequests = 4\npause_s = [0.5, 1.0]\n"
        '[[fault]]\ndo = "cut"\non = "worker0"\nto = "store"\nat = 0.1\nfor = 3.0\n'
        '[[fault]]\ndo = "lose_replies"\non = "worker0"\nat = 0.2\ncount = 2'
    )
    assert outcome.violations == []
