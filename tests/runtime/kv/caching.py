"""Sequences that fill blocks of a pool and store them, without an engine, for tests of KV events."""

from __future__ import annotations

from collections.abc import Sequence

from tests.runtime.kv.naming import block_hashes
from trinamo.runtime.kv.pool import BlockPool, block_count_for
from trinamo.runtime.protocol.kv.events import KvEvent


class CachedSequences:
    """At most `block_count` blocks of `block_tokens` tokens, for sequences known by slot."""

    def __init__(self, block_count: int, block_tokens: int) -> None:
        self.pool = BlockPool(block_count)
        self._block_tokens = block_tokens
        self._slots: dict[int, list[int]] = {}

    def run(self, slot: int, token_ids: Sequence[int]) -> None:
        """Compute a sequence in place of the one in `slot`; nothing if there are too few blocks."""
        self.release(slot)
        hashes = block_hashes(token_ids, self._block_tokens)
        found = [self.pool.find(digest) for digest in hashes]
        count = found.index(None) if None in found else len(found)
        shared = [block_id for block_id in found[:count] if block_id is not None]
        self.pool.share(shared)
        taken = self.pool.take(block_count_for(len(token_ids), self._block_tokens) - count)
        if taken is None:
            self.pool.give_back(shared)
            return
        blocks = self._slots[slot] = shared + taken
        parent = hashes[count - 1] if count else b""
        self.pool.store(blocks[count : len(hashes)], hashes[count:], parent)

    def release(self, slot: int) -> None:
        """The sequence in `slot` is gone; others can find its full blocks until they are evicted."""
        self.pool.give_back(self._slots.pop(slot, []))

    def take_events(self) -> list[KvEvent]:
        """What became of the stored blocks since the last call."""
        return self.pool.take_events()
