"""Which blocks hold the KV of which prefix, and what became of them. Sans-IO.

A full block is named by a hash that chains its parent's (`protocol/kv/names.py`), so equal prefixes
have equal names. A block has its parents here as long as it is here: whoever goes takes with it what
is behind it, the end of the chain first. Who owns a block, and which one must make room, is
`pool.py`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence

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

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._names

    def __len__(self) -> int:
        return len(self._names)

    def find(self, digest: bytes) -> int | None:
        """The block of this name."""
        return self._blocks.get(digest)

    def store(self, block_ids: Sequence[int], hashes: Sequence[bytes], parent: bytes) -> list[int]:
        """These blocks are full, each the child of the one before; which ones hold their KV here.

        Of a name that is taken it is the older block. What is behind a block that is not here is
        not stored.
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

    def remove(self, block_ids: Sequence[int]) -> list[int]:
        """Forget these blocks, in this order, and all behind them; which ones were forgotten."""
        removed: list[int] = []
        hashes: list[bytes] = []
        for block_id in block_ids:
            if block_id not in self._names:
                continue
            for each in reversed(self._with_descendants(block_id)):
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

    def _with_descendants(self, block_id: int) -> list[int]:
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
        return found

    def clear(self) -> None:
        """Forget all blocks."""
        if self._names:
            self._blocks.clear()
            self._names.clear()
            self._children.clear()
            self._events.append(Cleared())

    def take_events(self) -> list[KvEvent]:
        """What became of full blocks since the last call, in order."""
        events, self._events = self._events, []
        return events

    def held(self) -> list[KvEvent]:
        """All blocks, as the events that would tell them to somebody who knows of none."""
        return [Stored(tuple(self._blocks))] if self._blocks else []
