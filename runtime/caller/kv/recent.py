"""Which blocks an instance probably holds, where nobody tells: those of requests sent there lately.

For engines that tell no KV events, for prompts whose tokens cannot be known here, and where
`router.kv.events` is false.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from .loads import leading

_BLOCKS_MAX: Final = 1 << 20


class RecentBlocks:
    """The blocks of what was sent to each instance within `ttl_s`; the oldest go beyond `_BLOCKS_MAX`.

    Blocks are keys as of `block_keys`, or of anything else that names a prefix.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._tables: dict[str, dict[int, float]] = {}
        """By instance: each block with the end of its time."""
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
        self._tables.setdefault(instance_id, {}).update(dict.fromkeys(keys, until))
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
        for key in keys:
            if table.get(key, until + 1) <= until:
                del table[key]
        if not table:
            del self._tables[instance_id]

    def leave(self, instance_id: str) -> None:
        """The instance has left, and its blocks with it."""
        self._tables.pop(instance_id, None)

    def overlap(self, keys: Sequence[int], now: float) -> dict[str, int]:
        """How many leading blocks of a sequence each instance probably holds; none are left out."""
        self.expire(now)
        found = {instance_id: leading(table, keys) for instance_id, table in self._tables.items()}
        return {instance_id: count for instance_id, count in found.items() if count}
