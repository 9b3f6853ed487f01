"""What a seed says: the same plan each time, and only faults that the harness can answer for."""

from __future__ import annotations

from random import Random

import pytest

from tests.soak.census import gauge
from tests.soak.plan import Act, ask_of, turns_of

SEEDS = range(20)


def test_a_seed_is_one_plan_and_another_seed_another() -> None:
    first, again, other = (turns_of(seed, length_s=300, count=3) for seed in (7, 7, 8))

    assert first == again
    assert [turn.faults for turn in first] != [turn.faults for turn in other]
    asks = [[ask_of(first[0], dice) for _ in range(5)] for dice in (Random(1), Random(1))]
    assert asks[0] == asks[1]


def test_turns_are_aggregated_and_disaggregated_one_after_the_other() -> None:
    turns = turns_of(7, length_s=300, count=4)

    assert [turn.is_disaggregated for turn in turns] == [False, True, False, True]
    assert len({turn.name.split(", ")[1] for turn in turns}) == 3


@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_frontend_is_left_alone_and_the_first_workers_grow_old(seed: int) -> None:
    for turn in turns_of(seed, length_s=300, count=2):
        for fault in turn.faults:
            assert "frontend-1" not in fault.targets
            if fault.at_s >= turn.length_s / 3 and fault.act is not Act.STOP:
                assert not {each for each in turn.workers if each.endswith("-1")} & set(
                    fault.targets
                )


def test_every_kind_of_process_suffers_every_act() -> None:
    done = {
        (each.rstrip("-1234"), fault.act)
        for seed in SEEDS
        for turn in turns_of(seed, length_s=300, count=2)
        for fault in turn.faults
        for each in fault.targets
    }
    hurt = ("aggregated", "decode", "prefill", "frontend", "etcd", "nats")

    assert done == {(name, act) for name in hurt for act in Act}


def test_a_gauge_is_added_up_over_its_labels() -> None:
    page = """
trinamo_engine_kv_blocks{endpoint="a",state="used"} 2.0
trinamo_engine_kv_blocks{endpoint="a",state="free"} 9.0
trinamo_engine_kv_blocks{endpoint="b",state="used"} 1.0
trinamo_quarantined_blocks 4.0
trinamo_quarantined_blocks_more 5.0
"""

    assert gauge(page, ['engine_kv_blocks{state="used"}']) == 3
    assert gauge(page, ["quarantined_blocks", "nobody_s"]) == 4
