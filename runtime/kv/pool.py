"""Which KV blocks are free, and who owns the others: the one place that gives out block ids.

It knows nothing of bytes (`memory.py`) nor of who should get a block when there are too few
(`engines/loop/scheduler.py`). Owners are counted: whoever takes a free block is its first, and
sequences with the same prefix share its blocks. Giving a block back more often than it was taken is
a bug and fails an assertion.

A full block can be *stored* under the name of its prefix: a hash that chains its parent's
(`protocol/kv/names.py`), so equal prefixes have equal names. A block has its parents here as long as it is here:
whoever goes takes with it what is behind it, the end of the chain first. When its last owner gives
it back it is free like any other, but keeps its KV until a block is needed and no emptier one is
there: then the one unused longest is evicted, the ends of prefixes before their beginnings.

A transfer that may touch a block *leases* it (`kv/transfer/leases.py`). A leased block that its
owner gives back becomes free only when the last lease ends; one whose transfer cannot be stopped is
put in *quarantine*, until it is proven that nothing touches it any more.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from ..protocol.kv.events import Cleared, KvEvent, Removed, Stored


class PrefixCache:
    """Full blocks by their hashes; one block a hash, and one hash a block."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        """In order of storing, so that parents come before their children."""
        self._names: dict[int, tuple[bytes, bytes]] = {}
        """Hash and parent's hash of each block."""
        self._children: dict[bytes, int] = {}
        """How many blocks here have this one for their parent; none is left out."""
        self._events: list[KvEvent] = []

    def find(self, digest: bytes) -> int | None:
        """The block that holds this prefix; `share` it before anything else is taken."""
        return self._blocks.get(digest)

    def store(self, block_ids: Sequence[int], hashes: Sequence[bytes], parent: bytes) -> list[int]:
        """These blocks of one owner are full for good, each the child of the one before; which blocks hold their KV.

        Where that is another one, of the same name and older, the caller may `share` it and give
        its own back. `parent` is the hash before the first of them, empty if there is none. What is behind a
        block that is not here is not stored.
        """
        held: list[int] = []
        new: list[bytes] = []
        for block_id, digest in zip(block_ids, hashes, strict=True):
            other = self._blocks.get(digest)
            if other is not None:
                held.append(other)
            else:
                held.append(block_id)
                if not parent or parent in self._blocks:
                    self._blocks[digest] = block_id
                    self._names[block_id] = digest, parent
                    if parent:
                        self._children[parent] = self._children.get(parent, 0) + 1
                    new.append(digest)
            parent = digest
        if new:
            self._events.append(Stored(tuple(new)))
        return held

    def _remove(self, block_ids: Sequence[int]) -> list[int]:
        """Forget these blocks, in this order, and all behind them; which ones were forgotten."""
        removed: list[int] = []
        hashes: list[bytes] = []
        for block_id in block_ids:
            if block_id not in self._names:
                continue
            digest, _ = self._names[block_id]
            found = [block_id]
            if digest in self._children:
                # Seldom: whoever owns the end of a chain owns its beginning too, unless it computed
                # that itself while another was here already, or a transfer reads the end alone.
                doomed = {digest}
                for name, block in self._blocks.items():
                    if self._names[block][1] in doomed:
                        doomed.add(name)
                        found.append(block)
            for each in reversed(found):
                digest, parent = self._names.pop(each)
                del self._blocks[digest]
                if parent:
                    self._children[parent] -= 1
                    if not self._children[parent]:
                        del self._children[parent]
                removed.append(each)
                hashes.append(digest)
        if hashes:
            self._events.append(Removed(tuple(hashes)))
        return removed

    def _clear(self) -> None:
        if self._names:
            self._blocks.clear()
            self._names.clear()
            self._children.clear()
            self._events.append(Cleared())

    def take_events(self) -> list[KvEvent]:
        """What became of full blocks since the last call, in order."""
        events, self._events = self._events, []
        return events

    def stored(self) -> list[KvEvent]:
        """All stored blocks, as the events that would tell them to somebody who knows of none."""
        return [Stored(tuple(self._blocks))] if self._blocks else []


def block_count_for(tokens: int, block_tokens: int) -> int:
    """How many blocks of `block_tokens` tokens hold `tokens` tokens."""
    return -(-tokens // block_tokens)


class BlockPool(PrefixCache):
    """`block_count` blocks, numbered from 0, each counted in exactly one of four ways.

    `free_count + used_count + in_flight_count + quarantined_count` is always their number.

    The block given back last is taken first, so that a lightly loaded pool touches little memory.
    Taking, sharing and giving back cost O(1) a block.
    """

    def __init__(self, block_count: int) -> None:
        if block_count < 1:
            raise ValueError(f"a pool needs at least one block, not {block_count}")
        super().__init__()
        self._free = list(range(block_count - 1, -1, -1))
        self._owners = [0] * block_count
        """How many have each block."""
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Stored blocks that nothing keeps, the one unused longest first."""
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
        return len(self._owners)

    @property
    def free_count(self) -> int:
        """Blocks that can be taken: nobody owns them, and no transfer may touch them."""
        return len(self._free) + len(self._evictable)

    @property
    def taken_count(self) -> int:
        """Blocks that cannot be taken, whatever keeps them."""
        return self.block_count - self.free_count

    @property
    def used_count(self) -> int:
        """Blocks that somebody owns and no transfer may touch."""
        return self.taken_count - self.in_flight_count - self.quarantined_count

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

    def count_freed(self, block_ids: Iterable[int]) -> int:
        """How many would be free at once if these were given back, each as often as it is here."""
        return sum(
            count == self._owners[b] and not self._is_kept(b)
            for b, count in Counter(block_ids).items()
        )

    def take(self, count: int) -> list[int] | None:
        """The ids of `count` free blocks, now owned by the caller; None if fewer are free.

        None takes nothing: a caller never holds a part of what it asked for.
        """
        assert count >= 0, f"cannot take {count} blocks"
        if count > self.free_count:
            return None
        if count > len(self._free):
            self._forget(list(islice(self._evictable, count - len(self._free))))
        taken = [self._free.pop() for _ in range(count)]
        for block_id in taken:
            self._owners[block_id] = 1
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Own these stored blocks too, whoever else does; their KV stays as it is."""
        for block_id in block_ids:
            assert block_id in self._names, f"block {block_id} is shared but not stored"
            self._owners[block_id] += 1
            self._evictable.pop(block_id, None)

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Give up blocks taken or shared before, in the order of their sequence.

        The caller must have ended its reads and writes of them. Those that a transfer still may
        touch become free when their last lease ends.
        """
        # The end of a prefix is of no use without its beginning, so it is evicted first.
        for block_id in reversed(block_ids):
            self._check_used(block_id, "given back")
            self._owners[block_id] -= 1
            self._free_if_unheld(block_id)

    # --- prefixes ---

    def forget_prefixes(self) -> None:
        """No stored block can be trusted any more; their owners keep them."""
        self._clear()
        self._free += self._evictable
        self._evictable.clear()

    def _forget(self, block_ids: Sequence[int]) -> None:
        for block_id in self._remove(block_ids):
            if block_id in self._evictable:
                del self._evictable[block_id]
                self._free.append(block_id)

    # --- transfers ---

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
        before = self.free_count
        for block_id in block_ids:
            self._end_lease(block_id, "released")
            self._free_if_unheld(block_id)
        if self.free_count > before:
            self.on_change()

    def quarantine(self, block_ids: Iterable[int]) -> int:
        """One lease of each of these blocks does not end; how many were not in quarantine before.

        Nobody is given them until `readmit` has ended every quarantine of them, and nobody finds
        their prefixes any more: what they hold may be overwritten.
        """
        before = len(self._quarantined)
        ended = tuple(block_ids)
        for block_id in ended:
            self._end_lease(block_id, "put in quarantine")
            self._quarantined[block_id] = self._quarantined.get(block_id, 0) + 1
        self._forget(ended)
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
        """Free a block, if what it has lost just now was the last that kept it."""
        if self._owners[block_id] or self._is_kept(block_id):
            return
        if block_id in self._names:
            self._evictable[block_id] = None
        else:
            self._free.append(block_id)

    def _is_kept(self, block_id: int) -> bool:
        return block_id in self._leases or block_id in self._quarantined

    def _check_used(self, block_id: int, what: str) -> None:
        assert 0 <= block_id < len(self._owners), f"block {block_id} is not of this pool"
        assert self._owners[block_id], f"block {block_id} is {what} but was free"
