"""Which holders have which KV blocks: one map for all of them, made for a router's questions. Sans-IO.

A block's hash names its tokens and all before them, so nobody's chain is looked up: the map says for
each block which holders have it, as the bits of one number. Caches evict leaves first, so who holds
a block holds those before it, and how far each holder's blocks reach is found by bisection. Where
that is not so (an event was missed, a bound was reached) the answer is a hint that is wrong, which
costs a prefill and changes no token.

Forgetting a holder costs nothing at once: its bit counts no more, and `sweep` takes it out of the map
bit by bit, a small part at each call, so that no caller waits for a million blocks to go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Final

import attrs

_SHARDS: Final = 256
"""Parts of the map. With a million blocks one has 4096, which grows and is swept within a millisecond."""
_MASKS_MAX: Final = 4096
"""Combinations of holders that are kept once for all blocks that have them; beyond, anew."""
_REMOVED_MAX: Final = 4
"""A part is packed once a fourth of what it holds was removed: else it would grow by what is gone."""


@attrs.frozen
class Reach:
    """How far the blocks of named holders reach into one sequence, at one moment."""

    depths: Sequence[tuple[int, int]]
    """See `BlockHolders.depths`."""
    bits: Mapping[str, int]
    names: Mapping[int, str]

    def of(self, name: str) -> int:
        """How many leading blocks a holder has, which need not be one."""
        bit = self.bits.get(name, 0)
        # A plain loop, because this is often for every request.
        for mask, depth in self.depths:
            if mask & bit:
                return depth
        return 0

    def some(self, few: int, begin: int) -> Iterator[str]:
        """The holders, who reach furthest first; of equals `few` at most, from the bit `begin` on."""
        for mask, _ in sorted(self.depths, key=itemgetter(1), reverse=True):
            later, left = mask >> begin << begin, few
            for part in (later, mask ^ later):
                bits = part
                while bits and left:
                    bit = bits & -bits
                    bits, left = bits ^ bit, left - 1
                    yield self.names[bit]


class BlockHolders:
    """Blocks, each with its holders: 60 to 100 bytes a block, however many have it.

    Blocks are keys of `block_keys`. A holder is a bit that `join` has given; what else a caller
    knows of it is the caller's.
    """

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        self._removed = [0] * _SHARDS
        """Of each part, how many were removed since it was packed."""
        self._counts: dict[int, int] = {}
        """Of each holder, by its bit, how many blocks it has."""
        self._live = 0
        """The bits of those who count."""
        self._retired = 0
        """The bits of those who do not, and may still be in the map."""
        self._masks: dict[int, int] = {}
        self._sweeping = 0
        """The bits that this round of `sweep` takes out."""
        self._at = 0
        """The part that it takes next."""

    def __len__(self) -> int:
        """Blocks in the map, those of forgotten holders included until they are swept."""
        return sum(map(len, self._shards))

    @property
    def is_dirty(self) -> bool:
        return bool(self._retired)

    # --- holders ---

    def join(self) -> int:
        """A new holder without blocks: its bit."""
        taken = self._live | self._retired
        bit = ~taken & (taken + 1)
        self._live |= bit
        self._counts[bit] = 0
        return bit

    def leave(self, bit: int) -> None:
        """Forget a holder. Its bit is given again once `sweep` is through."""
        self._live &= ~bit
        if self._counts.pop(bit):
            self._retired |= bit

    def count(self, bit: int) -> int:
        return self._counts[bit]

    # --- blocks ---

    def store(self, bit: int, keys: Sequence[int], blocks_max: int) -> int:
        """The holder has these too; returns how many of them were one too many for `blocks_max`."""
        shards, masks, refused = self._shards, self._masks, 0
        count = self._counts[bit]
        for key in keys:
            shard = shards[key & 255]
            mask = shard.get(key, 0)
            if mask & bit:
                continue
            if count >= blocks_max:
                refused += 1
                continue
            count += 1
            if mask:
                mask |= bit
                shard[key] = masks.setdefault(mask, mask)
            else:
                shard[key] = bit
        self._counts[bit] = count
        if len(masks) > _MASKS_MAX:
            masks.clear()
        return refused

    def remove(self, bit: int, keys: Sequence[int]) -> None:
        """The holder has these no more; one that it had not is no error."""
        shards, masks, removed, count = self._shards, self._masks, self._removed, 0
        for key in keys:
            number = key & 255
            shard = shards[number]
            mask = shard.get(key, 0)
            if not mask & bit:
                continue
            count += 1
            mask ^= bit
            if mask:
                shard[key] = masks.setdefault(mask, mask)
                continue
            del shard[key]
            removed[number] += 1
            if removed[number] * _REMOVED_MAX > len(shard):
                shards[number] = dict(shard)
                removed[number] = 0
        self._counts[bit] -= count

    def sweep(self) -> None:
        """Take forgotten holders out of one part of the map; to be called while `is_dirty`."""
        if not self._at:
            self._sweeping = self._retired
        gone = self._sweeping
        kept: dict[int, int] = {}
        for key, mask in self._shards[self._at].items():
            if not mask & gone:
                kept[key] = mask
            elif left := mask & ~gone:
                kept[key] = self._masks.setdefault(left, left)
        self._shards[self._at] = kept
        self._removed[self._at] = 0
        self._at = (self._at + 1) % _SHARDS
        if not self._at:
            self._retired &= ~gone

    # --- questions ---

    def depths(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """How far the blocks of each holder reach into a sequence: bits, and how many leading blocks.

        Those who have not even the first are left out. `keys` are the sequence's from its start. At
        most one look-up for each two blocks, and few where many holders reach equally far.
        """
        if not keys:
            return []
        shards, end, found = self._shards, len(keys), []
        first = shards[keys[0] & 255].get(keys[0], 0) & self._live
        if not first:
            return []
        last = shards[keys[-1] & 255].get(keys[-1], 0) & first
        if last:
            found.append((last, end))
            first ^= last
        # Of each entry: these have the block before `low`, and not the block before `high`.
        open_ = [(1, end, first)] if first else []
        while open_:
            low, high, mask = open_.pop()
            while high - low > 1:
                middle = (low + high) >> 1
                key = keys[middle - 1]
                further = shards[key & 255].get(key, 0) & mask
                if further == mask:
                    low = middle
                elif not further:
                    high = middle
                else:
                    open_.append((middle, high, further))
                    high, mask = middle, mask ^ further
            found.append((mask, low))
        return found

    def blocks(self, bit: int) -> set[int]:
        """The keys of all blocks of a holder, for checks: goes through the whole map."""
        return {key for shard in self._shards for key, mask in shard.items() if mask & bit}
