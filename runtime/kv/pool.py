"""Which KV blocks are free: the one owner of block ids.

It knows nothing of bytes (`memory.py`) nor of who should get a block when there are too few
(`engines/loop/scheduler.py`). Every block has at most one owner; giving a block back twice, or one
that was never taken, is a bug and fails an assertion.

A transfer that may touch a block *leases* it (`kv/transfer/leases.py`). A leased block that its
owner gives back becomes free only when the last lease ends; one whose transfer cannot be stopped is
put in *quarantine*, until it is proven that nothing touches it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = ["BlockPool", "block_count_for"]


def block_count_for(tokens: int, block_tokens: int) -> int:
    """How many blocks of `block_tokens` tokens hold `tokens` tokens."""
    return -(-tokens // block_tokens)


class BlockPool:
    """`block_count` blocks, numbered from 0, each counted in exactly one of four ways.

    `free_count + used_count + in_flight_count + quarantined_count` is always their number.

    The block given back last is taken first, so that a lightly loaded pool touches little memory.
    Taking and giving back cost O(1) a block.
    """

    def __init__(self, block_count: int) -> None:
        if block_count < 1:
            raise ValueError(f"a pool needs at least one block, not {block_count}")
        self._free = list(range(block_count - 1, -1, -1))
        self._is_used = bytearray(block_count)
        self._leases: dict[int, int] = {}
        self._quarantined: dict[int, int] = {}
        """How many transfers keep each block there; those it has leases of, too, are not counted."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when the end of a transfer has freed blocks or lost them, for whoever waits."""

    def __repr__(self) -> str:
        return f"<BlockPool {self.used_count} of {self.block_count} blocks used>"

    @property
    def block_count(self) -> int:
        """All blocks, whatever is done with them."""
        return len(self._is_used)

    @property
    def free_count(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Blocks that somebody owns and no transfer may touch."""
        return self.block_count - self.free_count - self.in_flight_count - self.quarantined_count

    @property
    def in_flight_count(self) -> int:
        """Blocks that a transfer may touch, whether or not somebody still owns them."""
        return len(self._leases) - sum(b in self._leases for b in self._quarantined)

    @property
    def quarantined_count(self) -> int:
        """Blocks that nobody may take: a transfer into them could not be stopped."""
        return len(self._quarantined)

    @property
    def usable_count(self) -> int:
        """Blocks that can be had when nobody else has any."""
        return self.block_count - self.quarantined_count

    def count_unleased(self, block_ids: Iterable[int]) -> int:
        """How many of these would be free at once if their owner gave them back."""
        return sum(b not in self._leases and b not in self._quarantined for b in block_ids)

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
        """Give up blocks taken before. The caller must have ended its reads and writes of them.

        Those that a transfer still may touch become free when their last lease ends.
        """
        for block_id in block_ids:
            self._check_used(block_id, "given back")
            self._is_used[block_id] = 0
            if block_id not in self._leases and block_id not in self._quarantined:
                self._free.append(block_id)

    def lease(self, block_ids: Iterable[int]) -> None:
        """A transfer may touch these blocks from now on; their owner must have them still.

        All of them or, if one is not owned, none.
        """
        leased = tuple(block_ids)
        for block_id in leased:
            self._check_used(block_id, "leased")
        for block_id in leased:
            self._leases[block_id] = self._leases.get(block_id, 0) + 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One transfer will not touch these blocks any more; once for every `lease`."""
        before = len(self._free)
        for block_id in block_ids:
            self._end_lease(block_id, "released")
            self._free_if_unheld(block_id)
        if len(self._free) > before:
            self.on_change()

    def quarantine(self, block_ids: Iterable[int]) -> int:
        """One lease of each of these blocks does not end; how many were not in quarantine before.

        Nobody is given them until `readmit` has ended every quarantine of them.
        """
        before = len(self._quarantined)
        for block_id in block_ids:
            self._end_lease(block_id, "put in quarantine")
            self._quarantined[block_id] = self._quarantined.get(block_id, 0) + 1
        added = len(self._quarantined) - before
        if added:
            self.on_change()
        return added

    def readmit(self, block_ids: Iterable[int]) -> int:
        """It is proven that what put these into quarantine will not touch them; once for every one.

        How many have left quarantine. Those that nobody owns and no transfer may touch are free.
        """
        before = len(self._quarantined)
        for block_id in block_ids:
            assert block_id in self._quarantined, (
                f"block {block_id} is readmitted but was not in quarantine"
            )
            self._quarantined[block_id] -= 1
            if not self._quarantined[block_id]:
                del self._quarantined[block_id]
                self._free_if_unheld(block_id)
        left = before - len(self._quarantined)
        if left:
            self.on_change()
        return left

    def _end_lease(self, block_id: int, what: str) -> None:
        assert block_id in self._leases, f"block {block_id} is {what} but was not leased"
        self._leases[block_id] -= 1
        if not self._leases[block_id]:
            del self._leases[block_id]

    def _free_if_unheld(self, block_id: int) -> None:
        """Free a block that its owner has given back, if this was the last that kept it."""
        is_held = block_id in self._leases or block_id in self._quarantined
        if not is_held and not self._is_used[block_id]:
            self._free.append(block_id)

    def _check_used(self, block_id: int, what: str) -> None:
        assert 0 <= block_id < len(self._is_used), f"block {block_id} is not of this pool"
        assert self._is_used[block_id], f"block {block_id} is {what} but was free"
