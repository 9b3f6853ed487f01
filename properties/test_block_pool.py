"""A block has one owner, and free + used is the whole pool, whatever is taken and given back."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trinamo.runtime.kv.pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """The pool beside its simplest model: for every owner, the blocks it holds."""

    pool: BlockPool
    owners: list[list[int]]

    @initialize(block_count=st.integers(1, 40))
    def open(self, block_count: int) -> None:
        self.pool = BlockPool(block_count)
        self.owners = []

    @rule(count=st.integers(0, 50))
    def take(self, count: int) -> None:
        free = self.pool.free_count
        taken = self.pool.take(count)
        if count > free:
            assert taken is None
        else:
            assert taken is not None
            assert len(taken) == count
            self.owners.append(taken)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.owners:
            owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
            kept = data.draw(st.integers(0, len(owner)))
            self.pool.give_back(owner[kept:])
            self.owners.append(owner[:kept])

    @invariant()
    def every_block_has_one_owner_or_none(self) -> None:
        held = [block_id for owner in self.owners for block_id in owner]
        assert len(held) == len(set(held)) == self.pool.used_count
        assert all(0 <= block_id < self.pool.block_count for block_id in held)
        assert self.pool.free_count + self.pool.used_count == self.pool.block_count

    def teardown(self) -> None:
        for owner in self.owners:
            self.pool.give_back(owner)
        taken = self.pool.take(self.pool.block_count)
        assert taken is not None
        assert sorted(taken) == list(range(self.pool.block_count))


TestBlockPool = pytest.mark.slow(PoolMachine.TestCase)
