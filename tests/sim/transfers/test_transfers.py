"""Prefill and decode hosts under faults: every byte right, every block found again, every end typed."""

from __future__ import annotations

import pytest

from trinamo.runtime.errors import ConfigError
from trinamo.sim import SeedChoices
from trinamo.sim.scenario import Outcome
from trinamo.sim.scenario_faults import FAULTS
from trinamo.sim.scenario_file import parse_scenario

HEAD = 'name = "a"\nabout = "b"\n[transfers]\n'


def play(text: str, seed: int = 1, bug: str = "") -> Outcome:
    return parse_scenario(HEAD + text).run(SeedChoices(seed), bug=bug)


def kinds(outcome: Outcome) -> list[str]:
    return [row.kind for row in outcome.world.trace.rows]


@pytest.mark.parametrize("move", ["read", "write"])
@pytest.mark.parametrize("backends", ['["simulated"]', '["tcp"]', '["simulated", "tcp"]'])
def test_all_blocks_come_by_every_way(move: str, backends: str) -> None:
    outcome = play(f'move = "{move}"\nbackends = {backends}\nrequests = 2')
    assert [record.terminals for record in outcome.records] == [["complete"]] * 6
    assert outcome.breaches == []
    assert outcome.leftovers == {}
    assert "kv.fallback" not in kinds(outcome)


@pytest.mark.parametrize("move", ["read", "write"])
@pytest.mark.parametrize("delay_ms", range(8))
def test_a_backend_that_breaks_at_any_block_hands_over_to_the_next(
    move: str, delay_ms: int
) -> None:
    """One block is on the way at a time, so each delay breaks it at another block."""
    outcome = play(
        f'move = "{move}"\nslots = 1\nrequests = 1\nwindow = 1\nrequest_blocks = [8, 8]\n'
        "[network]\njitter_s = 0.0\n"
        '[[fault]]\ndo = "break_adapter"\non = "prefill0"\nafter_note = "kv.move#1"\n'
        f"delay = {delay_ms / 1000}\n"
    )
    assert [record.terminals for record in outcome.records] == [["complete"]]
    assert outcome.breaches == []
    assert kinds(outcome).count("kv.fallback") == 1


def test_an_abort_while_the_adapter_stalls_keeps_the_blocks_until_it_has_landed() -> None:
    outcome = play(
        'backends = ["simulated"]\nabort_one_in = 1\nslots = 1\nrequests = 1\n'
        "abort_after_s = [0.1, 0.2]\n"
        '[[fault]]\ndo = "stall_adapter"\non = "decode0"\nafter_note = "kv.move#1"\nfor = 1.0\n'
    )
    assert [record.terminals for record in outcome.records] == [["aborted"]]
    assert outcome.breaches == []
    assert "kv.quarantine" not in kinds(outcome)
    (end,) = outcome.world.trace.of_kind("kv.end")
    (over,) = outcome.world.trace.of_kind("fault.over")
    assert end.time_s >= over.time_s, "the request ended before its transfer had settled"


def test_a_transfer_that_never_settles_costs_its_blocks_and_nothing_else() -> None:
    outcome = play(
        'backends = ["simulated"]\nabort_one_in = 1\nslots = 1\nrequests = 1\ndrain_s = 1.0\n'
        "abort_after_s = [0.1, 0.2]\n"
        '[[fault]]\ndo = "stall_adapter"\non = "decode0"\nafter_note = "kv.move#1"\nfor = 9.0\n'
    )
    assert outcome.breaches == []
    assert "kv.quarantine" in kinds(outcome)
    assert outcome.transfers is not None
    pool = outcome.transfers.processes["decode0"].pool
    assert pool.quarantined_count > 0
    assert pool.free_count + pool.quarantined_count == pool.block_count


def test_a_restarted_host_is_another_peer_with_an_empty_pool() -> None:
    outcome = play(
        'requests = 6\ndeadline_s = 2.0\n[[fault]]\ndo = "kill"\non = "prefill0"\n'
        'after_note = "kv.move#5"\nfor = 0.3\n'
    )
    assert outcome.breaches == []
    ends = [record.outcome for record in outcome.records]
    assert ends[-1] == "complete"
    assert set(ends) != {"complete"}


def test_a_run_is_a_function_of_its_seed() -> None:
    text = (
        'move = "write"\nis_fenced = false\nabort_one_in = 2\n'
        '[[fault]]\ndo = "pause"\non = "*"\nat = [0.01, 0.05]\nfor = 0.5\n'
    )
    digests = [play(text, seed).digest for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("requests = 0", "at least 1"),
        ("request_blocks = [3, 99]", "pool_blocks"),
        ('backends = ["rdma"]', "rdma"),
        ("backends = []", "at least one"),
        ("[cluster]\nworkers = 2", "stands instead of"),
        ('[[fault]]\ndo = "stop"\non = "decode0"\nat = 1', "unknown fault 'stop'"),
        ('[[fault]]\ndo = "kill"\non = "worker0"\nat = 1', "unknown host 'worker0'"),
    ],
)
def test_a_wrong_plan_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_scenario(HEAD + text)


@pytest.mark.parametrize("do", [do for do, word in FAULTS.items() if "transfers" in word.of])
def test_every_fault_word_can_be_carried_out(do: str) -> None:
    to = 'to = "prefill0"\n' if FAULTS[do].has_link else ""
    outcome = play(
        f'deadline_s = 2.0\nrequests = 3\n[[fault]]\ndo = "{do}"\non = "decode0"\n{to}'
        'after_note = "kv.move#2"\nfor = 0.3\n'
    )
    assert outcome.breaches == []
    assert "fault" in kinds(outcome)


def test_faults_of_transfers_are_unknown_to_a_cluster() -> None:
    with pytest.raises(ConfigError, match="unknown fault 'stall_adapter'"):
        parse_scenario(
            'name = "a"\nabout = "b"\n[[fault]]\ndo = "stall_adapter"\non = "worker0"\nat = 1\n'
        )
