"""A block has one owner and is free when nothing keeps it, whatever is taken, leased and lost."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trinamo.runtime.kv.pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """The pool beside its simplest model: who owns, leases and quarantines which blocks."""

    pool: BlockPool
    owners: list[list[int]]
    leases: list[list[int]]
    quarantines: list[list[int]]

    @initialize(block_count=st.integers(1, 40))
    def open(self, block_count: int) -> None:
        self.pool = BlockPool(block_count)
        self.owners, self.leases, self.quarantines = [], [], []

    @rule(count=st.integers(0, 50))
    def take(self, count: int) -> None:
        free = self.pool.free_count
        taken = self.pool.take(count)
        if count > free:
            assert taken is None
        else:
            assert taken is not None
            assert len(taken) == count
            assert set(taken).isdisjoint(self.kept()), "something may touch it still"
            self.owners.append(taken)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.owners:
            owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
            kept = data.draw(st.integers(0, len(owner)))
            self.pool.give_back(owner[kept:])
            self.owners.append(owner[:kept])

    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        """Also blocks that are leased or in quarantine already: another transfer moves them."""
        owned = [block_id for owner in self.owners for block_id in owner]
        if owned:
            chosen = data.draw(st.lists(st.sampled_from(owned), unique=True, min_size=1))
            self.pool.lease(chosen)
            self.leases.append(chosen)

    @rule(data=st.data(), word=st.sampled_from(["release", "quarantine"]))
    def end_lease(self, data: st.DataObject, word: str) -> None:
        if self.leases:
            ended = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
            if word == "release":
                self.pool.release(ended)
            else:
                before = {block_id for each in self.quarantines for block_id in each}
                assert self.pool.quarantine(ended) == len(set(ended) - before)
                self.quarantines.append(ended)

    @rule(data=st.data())
    def readmit(self, data: st.DataObject) -> None:
        if self.quarantines:
            proven = self.quarantines.pop(data.draw(st.integers(0, len(self.quarantines) - 1)))
            after = {block_id for each in self.quarantines for block_id in each}
            assert self.pool.readmit(proven) == len(set(proven) - after)

    def kept(self) -> set[int]:
        """What a transfer may touch, or somebody owns."""
        holders = [*self.owners, *self.leases, *self.quarantines]
        return {block_id for holder in holders for block_id in holder}

    @invariant()
    def every_block_has_one_owner_or_none(self) -> None:
        held = [block_id for owner in self.owners for block_id in owner]
        assert len(held) == len(set(held))
        assert all(0 <= block_id < self.pool.block_count for block_id in held)

    @invariant()
    def every_block_is_counted_once(self) -> None:
        pool, lost = self.pool, {b for each in self.quarantines for b in each}
        leased = {b for each in self.leases for b in each} - lost
        owned = {b for each in self.owners for b in each} - lost - leased
        assert pool.quarantined_count == len(lost)
        assert pool.in_flight_count == len(leased)
        assert pool.used_count == len(owned)
        assert pool.free_count == pool.block_count - len(self.kept())

    def teardown(self) -> None:
        for lease in self.leases:
            self.pool.release(lease)
        for lost in self.quarantines:
            self.pool.readmit(lost)
        for owner in self.owners:
            self.pool.give_back(owner)
        taken = self.pool.take(self.pool.block_count)
        assert taken is not None
        assert sorted(taken) == list(range(self.pool.block_count))


TestBlockPool = pytest.mark.slow(PoolMachine.TestCase)
