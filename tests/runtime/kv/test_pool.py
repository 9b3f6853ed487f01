"""The block pool: who owns a block, and what is a bug."""

from __future__ import annotations

import pytest

from trinamo.runtime.kv.pool import BlockPool, block_count_for


def test_blocks_taken_are_distinct_and_the_sum_stays() -> None:
    pool = BlockPool(10)
    first = pool.take(4)
    second = pool.take(6)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == list(range(10))
    assert (pool.free_count, pool.used_count, pool.block_count) == (0, 10, 10)


def test_asking_for_too_many_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.take(1)
    assert pool.take(3) is None
    assert (pool.free_count, pool.used_count) == (2, 1)


def test_the_block_given_back_last_is_taken_first() -> None:
    pool = BlockPool(5)
    taken = pool.take(3)
    assert taken is not None
    pool.give_back([taken[1]])
    assert pool.take(1) == [taken[1]]


def test_whoever_waits_is_told_when_a_transfer_s_end_frees_or_loses_blocks() -> None:
    pool, told = BlockPool(4), list[tuple[int, int]]()
    pool.on_change = lambda: told.append((pool.free_count, pool.usable_count))
    assert pool.take(4) == [0, 1, 2, 3]
    pool.lease([0, 1, 2])
    pool.give_back([0, 1])
    assert pool.count_freed([0, 2, 3]) == 1
    assert told == []
    pool.release([2])
    assert told == [], "it has an owner still"
    pool.release([0])
    pool.quarantine([1])
    assert told == [(1, 4), (1, 3)]
    assert pool.count_freed([1, 2, 3]) == 2


def test_a_block_in_quarantine_for_two_reasons_is_free_when_both_are_gone() -> None:
    pool, told = BlockPool(2), list[int]()
    assert pool.take(1) == [0]
    pool.lease([0])
    pool.lease([0])
    pool.lease([0])
    assert pool.quarantine([0]) == 1
    assert pool.quarantine([0]) == 0
    pool.give_back([0])
    pool.on_change = lambda: told.append(pool.free_count)
    pool.release([0])
    assert pool.readmit([0]) == 0
    assert told == []
    assert pool.readmit([0]) == 1
    assert told == [2]
    with pytest.raises(AssertionError, match="was not in quarantine"):
        pool.readmit([0])


def test_a_block_that_leaves_quarantine_is_its_owner_s_if_it_has_one_still() -> None:
    pool = BlockPool(2)
    assert pool.take(1) == [0]
    pool.lease([0])
    pool.quarantine([0])
    assert pool.usable_count == 1
    pool.readmit([0])
    assert (pool.usable_count, pool.used_count, pool.free_count) == (2, 1, 1)


def test_giving_a_block_back_twice_is_a_bug() -> None:
    pool = BlockPool(2)
    taken = pool.take(1)
    assert taken is not None
    pool.give_back(taken)
    with pytest.raises(AssertionError, match="was free"):
        pool.give_back(taken)


@pytest.mark.parametrize("block_id", [-1, 2])
def test_a_block_of_another_pool_is_a_bug(block_id: int) -> None:
    with pytest.raises(AssertionError, match="not of this pool"):
        BlockPool(2).give_back([block_id])


def test_a_pool_without_blocks_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_tokens_fill_blocks(tokens: int, blocks: int) -> None:
    assert block_count_for(tokens, 16) == blocks
