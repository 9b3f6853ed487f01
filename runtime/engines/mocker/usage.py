"""How full the mocker's KV memory is: upstream's measure, on which the time of a step depends."""

from __future__ import annotations

from collections.abc import Sequence


class KvUsage:
    """The tokens of the sequences in the steps, those in blocks that several share counted once."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks: dict[int, list[int]] = {}
        """The full blocks of the sequence in each slot."""
        self._users: dict[int, int] = {}
        """How many sequences use each of them."""
        self._partial: dict[int, int] = {}
        """The tokens of each slot that fill no block."""

    @property
    def tokens(self) -> int:
        """All of them now."""
        return len(self._users) * self._block_tokens + sum(self._partial.values())

    def knows(self, slot: int) -> bool:
        """Whether the sequence in `slot` has grown before."""
        return slot in self._blocks

    def grow(self, slot: int, end: int, block_ids: Sequence[int]) -> None:
        """The first `end` tokens of the sequence in `slot` have KV, in these blocks."""
        full, partial = divmod(end, self._block_tokens)
        self._partial[slot] = partial
        counted = self._blocks.get(slot)
        if counted is None:
            counted = self._blocks[slot] = []
        if full > len(counted):
            new = block_ids[len(counted) : full]
            counted += new
            for block_id in new:
                self._users[block_id] = self._users.get(block_id, 0) + 1

    def release(self, slot: int) -> None:
        """The sequence in `slot` is gone."""
        self._partial.pop(slot, None)
        for block_id in self._blocks.pop(slot, ()):
            self._users[block_id] -= 1
            if not self._users[block_id]:
                del self._users[block_id]

    def clear(self) -> None:
        """All sequences are."""
        self._partial.clear()
        self._blocks.clear()
        self._users.clear()
