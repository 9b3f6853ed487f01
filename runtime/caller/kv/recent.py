"""Which blocks an instance probably holds, where nobody tells: those of requests sent there lately.

For engines that tell no KV events, for prompts whose tokens cannot be known here, and where
`router.kv.events` is false.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from ...protocol.kv.holders import BlockHolders, Reach

_BLOCKS_MAX: Final = 1 << 20


class RecentBlocks:
    """The blocks of what was sent to each instance within `ttl_s`; the oldest go beyond `_BLOCKS_MAX`.

    Blocks are keys as of `block_keys`, or of anything else that names a prefix.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._tables: dict[str, dict[int, float]] = {}
        """By instance: each block with the end of its time."""
        self._map = BlockHolders()
        """The same blocks, for questions."""
        self._bits: dict[str, int] = {}
        self._instances: dict[int, str] = {}
        self._sent: deque[tuple[float, str, Sequence[int]]] = deque()
        """In order of their end."""
        self._waiting = 0
        """Blocks in `_sent`, those that were sent again counted again."""

    def __len__(self) -> int:
        return sum(map(len, self._tables.values()))

    def send(self, instance_id: str, keys: Sequence[int], now: float) -> None:
        """A prompt of these blocks is sent to the instance."""
        if not keys:
            return
        self.expire(now)
        until = now + self._ttl_s
        if instance_id not in self._tables:
            self._tables[instance_id] = {}
            bit = self._bits[instance_id] = self._map.join()
            self._instances[bit] = instance_id
        self._tables[instance_id].update(dict.fromkeys(keys, until))
        self._map.store(self._bits[instance_id], keys, _BLOCKS_MAX)
        self._sent.append((until, instance_id, keys))
        self._waiting += len(keys)
        while self._waiting > _BLOCKS_MAX:
            self._forget_oldest()

    def expire(self, now: float) -> None:
        """Forget what is older than `ttl_s`."""
        while self._sent and self._sent[0][0] <= now:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        until, instance_id, keys = self._sent.popleft()
        self._waiting -= len(keys)
        table = self._tables.get(instance_id)
        if table is None:
            return
        over = dict.fromkeys(key for key in keys if table.get(key, until + 1) <= until)
        for key in over:
            del table[key]
        self._map.remove(self._bits[instance_id], [*over])
        if not table:
            self.leave(instance_id)

    def leave(self, instance_id: str) -> None:
        """The instance has left, and its blocks with it."""
        table = self._tables.pop(instance_id, None)
        if table is not None:
            bit = self._bits.pop(instance_id)
            self._map.remove(bit, [*table])
            self._map.leave(bit)
            del self._instances[bit]

    def reach(self, keys: Sequence[int], now: float) -> Reach:
        """How far what each instance probably holds reaches into a sequence."""
        self.expire(now)
        return Reach(self._map.depths(keys), self._bits, self._instances)
