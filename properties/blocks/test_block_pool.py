"""A block is free when nothing keeps it, and holds its prefix until somebody needs it otherwise.

Whatever is taken, shared, stored, given back, leased and lost.
"""

from __future__ import annotations

from collections import Counter

import attrs
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.protocol.kv.events import Cleared, KvEvent, Removed, Stored

PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(bytes)
"""Names of prefixes: each is its parent's and one more byte, of two, so that they meet."""


@attrs.define(eq=False)
class Owner:
    """Blocks in order; the first ones hold the prefix `path`, a byte each."""

    blocks: list[int]
    path: bytes = b""


def names(path: bytes, first: int = 0) -> list[bytes]:
    return [path[:end] for end in range(first + 1, len(path) + 1)]


class PoolMachine(RuleBasedStateMachine):
    """The pool beside its simplest model: who owns, leases, quarantines and has stored what."""

    pool: BlockPool
    owners: list[Owner]
    leases: list[list[int]]
    quarantines: list[list[int]]
    stored: dict[bytes, int]

    @initialize(block_count=st.integers(1, 24))
    def open(self, block_count: int) -> None:
        self.pool = BlockPool(block_count)
        self.owners, self.leases, self.quarantines, self.stored = [], [], [], {}

    @rule(count=st.integers(0, 12))
    def take(self, count: int) -> None:
        free, kept = self.pool.free_count, self.kept()
        empty = self.pool.block_count - len(kept | set(self.stored.values()))
        taken = self.pool.take(count)
        events = self.hear()
        if count > free:
            assert taken is None
        else:
            assert taken is not None
            assert len(taken) == len(set(taken)) == count
            assert kept.isdisjoint(taken), "something may touch it still"
            self.owners.append(Owner(taken))
        if taken is None or count <= empty:
            assert not events, "a prefix was evicted without need"

    @rule(data=st.data(), more=PATHS)
    def share(self, data: st.DataObject, more: bytes) -> None:
        """As a new sequence does: what is found of its prefix, from the first block on."""
        path = data.draw(st.sampled_from([b"", *sorted(self.stored)])) + more
        found: list[int] = []
        for name in names(path):
            block = self.pool.find(name)
            assert block == self.stored.get(name)
            if block is None:
                break
            found.append(block)
        self.pool.share(found)
        self.owners.append(Owner(found, path[: len(found)]))

    @rule(data=st.data(), more=PATHS, is_pinned=st.booleans())
    def store(self, data: st.DataObject, more: bytes, is_pinned: bool) -> None:
        """A sequence has filled its next blocks; where they are here already it takes the older."""
        growing = [each for each in self.owners if len(each.blocks) > len(each.path)]
        if not growing:
            return
        owner = data.draw(st.sampled_from(growing))
        first = len(owner.path)
        owner.path = (owner.path + more)[: len(owner.blocks)]
        new = names(owner.path, first)
        own = owner.blocks[first : len(owner.path)]
        held = self.pool.store(own, new, owner.path[:first])
        expected = dict(self.stored)
        for index, (name, block) in enumerate(zip(new, own, strict=True)):
            if name in expected:
                assert held[index] == expected[name]
            else:
                assert held[index] == block
                if not name[:-1] or name[:-1] in expected:
                    expected[name] = block
        for event in self.hear(dict(zip(new, own, strict=True))):
            assert isinstance(event, Stored)
        assert self.stored == expected
        if not is_pinned:
            for index, block in enumerate(held, start=first):
                if block != owner.blocks[index]:
                    self.pool.share([block])
                    self.pool.give_back([owner.blocks[index]])
                    owner.blocks[index] = block

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.owners:
            owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
            # Mostly all of them, as sequences do.
            kept = data.draw(st.sampled_from([0, 0, len(owner.blocks) // 2]))
            self.pool.give_back(owner.blocks[kept:])
            self.owners.append(Owner(owner.blocks[:kept], owner.path[:kept]))

    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        """Also blocks that are leased or in quarantine already: another transfer moves them."""
        owned = sorted({block_id for owner in self.owners for block_id in owner.blocks})
        if owned:
            chosen = data.draw(st.lists(st.sampled_from(owned), unique=True, min_size=1))
            self.pool.lease(chosen)
            self.leases.append(chosen)

    @rule(data=st.data(), word=st.sampled_from(["release", "release", "quarantine"]))
    def end_lease(self, data: st.DataObject, word: str) -> None:
        if self.leases:
            ended = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
            if word == "release":
                self.pool.release(ended)
            else:
                before = {block_id for each in self.quarantines for block_id in each}
                assert self.pool.quarantine(ended) == len(set(ended) - before)
                self.quarantines.append(ended)
                self.hear()
                assert set(ended).isdisjoint(self.stored.values()), "it may be overwritten"

    @rule(data=st.data())
    def readmit(self, data: st.DataObject) -> None:
        if self.quarantines:
            proven = self.quarantines.pop(data.draw(st.integers(0, len(self.quarantines) - 1)))
            after = {block_id for each in self.quarantines for block_id in each}
            assert self.pool.readmit(proven) == len(set(proven) - after)

    @rule()
    def forget_prefixes(self) -> None:
        self.pool.forget_prefixes()
        assert self.hear() in ([], [Cleared()])
        assert not self.stored

    def hear(self, blocks: dict[bytes, int] | None = None) -> list[KvEvent]:
        """Follow the events as a router would; `blocks` are those that can have been stored."""
        events = self.pool.take_events()
        for event in events:
            match event:
                case Stored(hashes):
                    for name in hashes:
                        assert name not in self.stored, "a hit is no news"
                        assert len(name) == 1 or name[:-1] in self.stored
                        self.stored[name] = (blocks or {})[name]
                case Removed(hashes):
                    for name in hashes:
                        del self.stored[name]
                        children = [each for each in self.stored if each[:-1] == name]
                        assert not children, "the end of a prefix goes before its beginning"
                case Cleared():
                    self.stored.clear()
        return events

    def kept(self) -> set[int]:
        """What a transfer may touch, or somebody owns."""
        owned = [owner.blocks for owner in self.owners]
        return {b for holder in (*owned, *self.leases, *self.quarantines) for b in holder}

    @invariant()
    def every_block_is_counted_once(self) -> None:
        pool, lost = self.pool, {b for each in self.quarantines for b in each}
        leased = {b for each in self.leases for b in each} - lost
        owned = {b for each in self.owners for b in each.blocks} - lost - leased
        assert pool.quarantined_count == len(lost)
        assert pool.in_flight_count == len(leased)
        assert pool.used_count == len(owned)
        assert pool.free_count == pool.block_count - len(self.kept())

    @invariant()
    def what_the_events_add_up_to_can_be_found(self) -> None:
        assert len(set(self.stored.values())) == len(self.stored), "one block, two prefixes"
        held = {name for event in self.pool.stored() for name in event.block_hashes}
        assert held == set(self.stored)
        assert all(self.pool.find(name) == block for name, block in self.stored.items())
        assert all(len(name) == 1 or name[:-1] in self.stored for name in self.stored)

    @invariant()
    def a_prefix_has_one_owner_beside_every_other(self) -> None:
        """Who gives back all it has frees what nobody else has."""
        count = Counter(b for owner in self.owners for b in owner.blocks)
        moved = {b for each in (*self.leases, *self.quarantines) for b in each}
        for owner in self.owners:
            alone = [b for b in owner.blocks if count[b] == 1 and b not in moved]
            assert self.pool.count_freed(owner.blocks) == len(alone)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for lease in self.leases:
            self.pool.release(lease)
        for lost in self.quarantines:
            self.pool.readmit(lost)
        for owner in self.owners:
            self.pool.give_back(owner.blocks)
        taken = self.pool.take(self.pool.block_count)
        assert taken is not None
        assert sorted(taken) == list(range(self.pool.block_count))
        self.hear()
        assert not self.stored


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
