"""The mocker's block cache: which full blocks a real engine would still hold, and who uses them.

A block is *partial* while its sequence fills it and belongs to that sequence alone. When it is full
it is *promoted*: its hash chains its parent's, so equal prefixes share one block. Full blocks are
*active* while a sequence refers to them and *inactive*, which means evictable, afterwards; the one
unused longest goes first. Only a new full block is told as stored and only an eviction as
removed: a hit changes nothing that a router should know.

Sans-IO. Who may run at all, and who is preempted, is decided by `engines/loop/scheduler.py` for
every engine; sharing only makes the cache smaller than what the scheduler has handed out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import attrs

from ...protocol.kv.events import KvEvent, Removed, Stored, block_hash

__all__ = ["BlockCache", "SlotBlocks"]


@attrs.define
class SlotBlocks:
    """The blocks of one running sequence."""

    hashes: list[bytes] = attrs.Factory(list)
    """Of its full blocks, in order."""
    partial: list[int] = attrs.Factory(list)
    """The tokens of the block being filled."""

    @property
    def last_hash(self) -> bytes:
        return self.hashes[-1] if self.hashes else b""


class BlockCache:
    """At most `block_count` blocks of `block_tokens` tokens, for sequences known by slot."""

    def __init__(
        self,
        block_count: int,
        block_tokens: int,
        *,
        has_prefix_caching: bool = True,
        on_event: Callable[[KvEvent], None] = lambda _: None,
    ) -> None:
        self.block_count, self.block_tokens = block_count, block_tokens
        self._has_prefix_caching = has_prefix_caching
        self._on_event = on_event
        self._slots: dict[int, SlotBlocks] = {}
        self._active: dict[bytes, int] = {}
        """Full blocks in use, with the number of sequences that use them."""
        self._inactive: OrderedDict[bytes, None] = OrderedDict()
        """Full blocks nobody uses, the one unused longest first."""
        self._parents: dict[bytes, bytes] = {}
        """Of every full block, active or not."""

    @property
    def active_count(self) -> int:
        """Blocks in use: full ones once each, and one for every partial block."""
        return len(self._active) + sum(bool(blocks.partial) for blocks in self._slots.values())

    def held(self) -> list[KvEvent]:
        """All full blocks, as the events that would tell them to somebody who knows of none."""
        return [Stored(parent, (digest,)) for digest, parent in self._parents.items()]

    @property
    def active_tokens(self) -> int:
        """Tokens in the blocks in use, each shared block once."""
        partial = sum(len(blocks.partial) for blocks in self._slots.values())
        return len(self._active) * self.block_tokens + partial

    def append(self, slot: int, position: int, token_ids: Sequence[int]) -> int:
        """The sequence in `slot` computes `token_ids` from `position` on; how many are not cached.

        Position 0 starts a sequence. Whole blocks that are held already cost nothing, but never
        the last token, whose step yields the next one.
        """
        if position == 0:
            self.release(slot)
        blocks = self._slots.get(slot)
        if blocks is None:
            blocks = self._slots[slot] = SlotBlocks()
        fresh = len(token_ids)
        if fresh == 1 and 0 < len(blocks.partial) < self.block_tokens - 1:
            # Nearly every token of an answer: no block begins, and none is full.
            blocks.partial.append(token_ids[0])
            return 1
        # Only while everything before was a hit, or new blocks would be taken for old ones.
        new: list[bytes] = []
        parent = blocks.last_hash
        for token_id in token_ids:
            blocks.partial.append(token_id)
            if len(blocks.partial) < self.block_tokens:
                continue
            full, blocks.partial = blocks.partial, []
            digest = block_hash(blocks.last_hash, full)
            is_hit = self._use(digest, blocks.last_hash)
            if is_hit:
                self._tell_stored(parent, new)
                new, parent = [], digest
                fresh -= min(self.block_tokens, fresh)
            else:
                new.append(digest)
            blocks.hashes.append(digest)
        self._tell_stored(parent, new)
        self._fit()
        return max(fresh, 1)

    def release(self, slot: int) -> None:
        """The sequence in `slot` is gone: its full blocks become evictable, its partial one free."""
        blocks = self._slots.pop(slot, None)
        if blocks is None:
            return
        # The end of the chain first: a block without its parent is of no use to anybody.
        for digest in reversed(blocks.hashes):
            count = self._active[digest] - 1
            if count:
                self._active[digest] = count
                continue
            del self._active[digest]
            if self._has_prefix_caching:
                self._inactive[digest] = None
            else:
                del self._parents[digest]
                self._on_event(Removed((digest,)))

    def clear(self) -> None:
        """Forget every sequence; what was full stays evictable."""
        for slot in list(self._slots):
            self.release(slot)

    def _use(self, digest: bytes, parent: bytes) -> bool:
        """Refer to a full block behind `parent`; whether it was there."""
        if digest in self._active and self._has_prefix_caching:
            self._active[digest] += 1
            return True
        if digest in self._inactive:
            del self._inactive[digest]
            self._active[digest] = 1
            return True
        self._active[digest] = self._active.get(digest, 0) + 1
        self._parents[digest] = parent
        return False

    def _tell_stored(self, parent: bytes, new: list[bytes]) -> None:
        if new:
            self._on_event(Stored(parent, tuple(new)))

    def _fit(self) -> None:
        evicted = []
        while self._inactive and self.active_count + len(self._inactive) > self.block_count:
            digest, _ = self._inactive.popitem(last=False)
            del self._parents[digest]
            evicted.append(digest)
        if evicted:
            self._on_event(Removed(tuple(evicted)))
