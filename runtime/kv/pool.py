"""Which KV blocks are free: the one owner of block ids.

It knows nothing of bytes (`memory.py`) nor of who should get a block when there are too few
(`engines/scheduler.py`). Every block has at most one owner; giving a block back twice, or one
that was never taken, is a bug and fails an assertion.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["BlockPool", "block_count_for"]


def block_count_for(tokens: int, block_tokens: int) -> int:
    """How many blocks of `block_tokens` tokens hold `tokens` tokens."""
    return -(-tokens // block_tokens)


class BlockPool:
    """`block_count` blocks, numbered from 0; `free_count + used_count` is always their number.

    The block given back last is taken first, so that a lightly loaded pool touches little memory.
    Taking and giving back cost O(1) a block.
    """

    def __init__(self, block_count: int) -> None:
        if block_count < 1:
            raise ValueError(f"a pool needs at least one block, not {block_count}")
        self._free = list(range(block_count - 1, -1, -1))
        self._is_used = bytearray(block_count)

    def __repr__(self) -> str:
        return f"<BlockPool {self.used_count} of {self.block_count} blocks used>"

    @property
    def block_count(self) -> int:
        """All blocks, free or used."""
        return len(self._is_used)

    @property
    def free_count(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Blocks that somebody owns."""
        return len(self._is_used) - len(self._free)

    def take(self, count: int) -> list[int] | None:
        """The ids of `count` free blocks, now owned by the caller; None if fewer are free.

        None takes nothing: a caller never holds a part of what it asked for.
        """
        assert count >= 0, f"cannot take {count} blocks"
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block_id in taken:
            self._is_used[block_id] = 1
        return taken

    def give_back(self, block_ids: Iterable[int]) -> None:
        """Free blocks taken before. The caller must have ended every read and write of them."""
        for block_id in block_ids:
            assert 0 <= block_id < len(self._is_used), f"block {block_id} is not of this pool"
            assert self._is_used[block_id], f"block {block_id} is given back but was free"
            self._is_used[block_id] = 0
            self._free.append(block_id)
