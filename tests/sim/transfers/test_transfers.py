"""Prefill and decode hosts under faults: every byte right, every block found again, every end typed."""

from __future__ import annotations

import pytest

from trinamo.runtime.errors import ConfigError
from trinamo.sim import SeedChoices
from trinamo.sim.scenario.faults import FAULTS
from trinamo.sim.scenario.file import parse_scenario
from trinamo.sim.scenario.outcome import Outcome
from trinamo.sim.scenario.run import run_scenario

HEAD = 'name = "a"\nabout = "b"\n[transfers]\n'


def play(text: str, seed: int = 1, bug: str = "") -> Outcome:
    return run_scenario(parse_scenario(HEAD + text), SeedChoices(seed), bug=bug)


def kinds(outcome: Outcome) -> list[str]:
    return [row.kind for row in outcome.world.trace.rows]


@pytest.mark.parametrize("move", ["read", "write"])
@pytest.mark.parametrize("backends", ['["simulated"]', '["tcp"]', '["simulated", "tcp"]'])
def test_all_blocks_come_by_every_way(move: str, backends: str) -> None:
    outcome = play(f'move = "{move}"\nbackends = {backends}\nrequests = 2')
    assert [record.terminals for record in outcome.records] == [["complete"]] * 6
    assert outcome.violations == []
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
    assert outcome.violations == []
    assert kinds(outcome).count("kv.fallback") == 1


def test_an_abort_while_the_adapter_stalls_keeps_the_blocks_until_it_has_landed() -> None:
    """There are blocks for one request only: the next one waits until those of the first are free."""
    outcome = play(
        'backends = ["simulated"]\nabort_one_in = 1\nslots = 1\nrequests = 2\n'
        "request_blocks = [4, 4]\npool_blocks = 4\nabort_after_s = [0.1, 0.2]\n"
        '[[fault]]\ndo = "stall_adapter"\non = "decode0"\nafter_note = "kv.move#1"\nfor = 1.0\n'
    )
    assert [record.terminals for record in outcome.records] == [["aborted"], ["complete"]]
    assert outcome.violations == []
    assert "kv.quarantine" not in kinds(outcome)
    (first, second) = outcome.world.trace.of_kind("kv.move")
    (over,) = outcome.world.trace.of_kind("fault.over")
    assert first.time_s < over.time_s <= second.time_s


def test_blocks_of_a_transfer_that_settles_late_are_in_quarantine_until_then() -> None:
    outcome = play(
        'backends = ["simulated"]\nabort_one_in = 1\nslots = 1\nrequests = 1\ndrain_s = 1.0\n'
        "abort_after_s = [0.1, 0.2]\n"
        '[[fault]]\ndo = "stall_adapter"\non = "decode0"\nafter_note = "kv.move#1"\nfor = 9.0\n'
    )
    assert outcome.violations == []
    (gone,) = outcome.world.trace.of_kind("kv.quarantine")
    (back,) = outcome.world.trace.of_kind("kv.readmit")
    (over,) = outcome.world.trace.of_kind("fault.over")
    assert gone.time_s < over.time_s <= back.time_s
    assert outcome.transfers is not None
    pool = outcome.transfers.processes["decode0"].pool
    assert pool.free_count == pool.block_count


def test_a_block_may_lie_in_several_places() -> None:
    outcome = play('layout = "layer_first"\nmove = "write"\nis_fenced = false\nrequests = 2')
    assert [record.terminals for record in outcome.records] == [["complete"]] * 6
    assert outcome.violations == []


def test_a_host_that_leaves_in_order_is_not_in_the_store_any_more() -> None:
    outcome = play(
        "prefills = 2\nrequests = 8\ndeadline_s = 2.0\n"
        '[[fault]]\ndo = "stop"\non = "prefill0"\nafter_note = "kv.move#3"\n'
    )
    assert outcome.violations == []
    assert {record.outcome for record in outcome.records} <= {"complete", "refused", "unanswered"}
    left = [row.host for row in outcome.world.trace.of_kind("kv.left")]
    assert left[0] == "prefill0.1"
    assert sorted(left) == ["decode0.1", "prefill0.1", "prefill1.1"]
    assert outcome.cluster.store.values("") == {}


def test_a_restarted_host_waits_until_its_former_life_is_not_registered_any_more() -> None:
    outcome = play(
        'requests = 6\ndeadline_s = 1.0\n[[fault]]\ndo = "kill"\non = "prefill0"\n'
        'after_note = "kv.move#5"\nfor = 0.3\n'
    )
    assert outcome.violations == []
    assert "kv.fenced" in kinds(outcome)
    (expired,) = outcome.world.trace.of_kind("store.expire")
    again = [r for r in outcome.world.trace.of_kind("kv.ready") if r.host == "prefill0.2"]
    assert again[0].time_s > expired.time_s


def test_requests_that_fail_long_after_the_last_fault_are_a_breach() -> None:
    """The bound says when a host that was killed must be found again; this one is too short."""
    text = (
        'requests = 8\ndeadline_s = 0.3\nwhole_after_s = {}\n[[fault]]\ndo = "kill"\n'
        'on = "prefill0"\nafter_note = "kv.move#5"\nfor = 0.2\n'
    )
    assert [violation.invariant for violation in play(text.format(0.1)).violations][:1] == ["I15"]
    assert play(text.format(4.0)).violations == []


def test_a_store_that_loses_replies_or_its_history_harms_no_transfer() -> None:
    outcome = play(
        "requests = 4\nhold_s = [0.2, 0.6]\n"
        '[[fault]]\ndo = "lose_replies"\non = "decode0"\nat = 0.1\ncount = 2\n'
        '[[fault]]\ndo = "compact"\nat = 0.2\n'
        '[[fault]]\ndo = "kill"\non = "store"\nat = 0.3\nfor = 1.0\n'
    )
    assert {record.outcome for record in outcome.records} == {"complete"}
    assert outcome.violations == []


def test_a_restarted_host_is_another_peer_with_an_empty_pool() -> None:
    outcome = play(
        'requests = 6\ndeadline_s = 2.0\n[[fault]]\ndo = "kill"\non = "prefill0"\n'
        'after_note = "kv.move#5"\nfor = 0.3\n'
    )
    assert outcome.violations == []
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
        ("block_bytes = 7", "must be even"),
        ('layout = "sideways"', "sideways"),
        ('[[fault]]\ndo = "unplug"\non = "decode0"\nat = 1', "unknown fault 'unplug'"),
        ('[[fault]]\ndo = "kill"\non = "worker0"\nat = 1', "unknown host 'worker0'"),
    ],
)
def test_a_wrong_plan_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_scenario(HEAD + text)


@pytest.mark.parametrize("do", FAULTS)
def test_every_fault_word_can_be_carried_out(do: str) -> None:
    to = 'to = "prefill0"\n' if FAULTS[do].has_link else ""
    outcome = play(
        f'deadline_s = 2.0\nrequests = 3\n[[fault]]\ndo = "{do}"\non = "decode0"\n{to}'
        'after_note = "kv.move#2"\nfor = 0.3\n'
    )
    assert outcome.violations == []
    assert "fault" in kinds(outcome)


def test_the_digest_covers_the_bytes_of_blocks_that_no_process_sends() -> None:

    outcome = play("requests = 2\n")
    blocks = outcome.world.trace.of_kind("block")
    assert blocks
    assert len({row.field("crc") for row in blocks}) > 1
