"""Which blocks one worker holds, as its KV events tell it, and the snapshot of that. Sans-IO.

The worker keeps one table of what it has told (`kv/events.py`), every router one for each worker
(`kv/index.py`): the same code at both ends, so equal events make equal tables. Applying an event
again changes nothing once those after it have been applied again too, which is what lets a
snapshot be taken in parts while events go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from ...errors import RemoteProtocolError
from ..undecodable import UNDECODABLE
from .events import Cleared, KvEvent, Removed, Stored, join_hashes, split_hashes

__all__ = ["BlockTable"]


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """Hashes, joined: of first blocks, of all others, and of the parents of those."""

    roots: bytes
    hashes: bytes
    parents: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Part).decode


class BlockTable:
    """Full blocks by hash, each with its parent's: about 120 bytes a block.

    At most `blocks_max` are kept. Blocks beyond are refused and counted, so the table is always a
    subset of what the worker holds.
    """

    def __init__(self, blocks_max: int | None = None) -> None:
        self.refused = 0
        """How often a block was not kept because `blocks_max` were there."""
        self.blocks_max = blocks_max
        self._parents: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, digest: object) -> bool:
        return digest in self._parents

    @property
    def parents(self) -> Mapping[bytes, bytes]:
        """Every block with its parent, which is empty for the first of a sequence; live."""
        return MappingProxyType(self._parents)

    def apply(self, event: KvEvent) -> None:
        """Take one event. Storing again, and removing what is not there, is no error."""
        match event:
            case Stored(parent, hashes):
                self._store(zip(hashes, (parent, *hashes), strict=False), len(hashes))
            case Removed(hashes):
                for digest in hashes:
                    self._parents.pop(digest, None)
            case Cleared():
                self._parents.clear()

    def _store(self, blocks: Iterable[tuple[bytes, bytes]], count: int) -> None:
        parents, blocks_max = self._parents, self.blocks_max
        if blocks_max is None or len(parents) + count <= blocks_max:
            parents.update(blocks)
            return
        for digest, parent in blocks:
            if digest in parents or len(parents) < blocks_max:
                parents[digest] = parent
            else:
                self.refused += 1

    def clear(self) -> None:
        """Forget all blocks."""
        self._parents.clear()

    def leading(self, hashes: Sequence[bytes]) -> int:
        """How many of a sequence's blocks, from the first on, are held without a gap."""
        find, parent, count = self._parents.get, b"", 0
        for digest in hashes:
            if find(digest) != parent:
                break
            parent = digest
            count += 1
        return count

    # --- snapshots ---

    def encode_part(self, part: int, parts: int) -> bytes:
        """The blocks whose hash falls to `part` of `parts`, 8 to 16 bytes each."""
        blocks: Iterable[tuple[bytes, bytes]] = self._parents.items()
        if parts > 1:
            blocks = [each for each in blocks if _part_of(each[0], parts) == part]
        roots: list[bytes] = []
        hashes: list[bytes] = []
        parents: list[bytes] = []
        for digest, parent in blocks:
            if parent:
                hashes.append(digest)
                parents.append(parent)
            else:
                roots.append(digest)
        return _encode(_Part(join_hashes(roots), join_hashes(hashes), join_hashes(parents)))

    def replace(self, bodies: Sequence[bytes]) -> None:
        """Take all parts of a snapshot instead of what was known; none mean: no block.

        Raises `RemoteProtocolError`, and has changed nothing, if one is no part of a snapshot.
        """
        blocks: list[tuple[bytes, bytes]] = []
        for body in bodies:
            blocks += _decode_part(body)
        self._parents.clear()
        self._store(blocks, len(blocks))


def _part_of(digest: bytes, parts: int) -> int:
    # The hash is as good as random, so the parts are of about the same size.
    return int.from_bytes(digest[-2:], "big") % parts


def _decode_part(body: bytes) -> Iterable[tuple[bytes, bytes]]:
    try:
        part = _decode(body)
    except UNDECODABLE as error:
        raise RemoteProtocolError(f"not a snapshot of KV blocks: {error}") from error
    if len(part.hashes) != len(part.parents):
        raise RemoteProtocolError("a snapshot of KV blocks in which parents are missing")
    yield from ((digest, b"") for digest in split_hashes(part.roots))
    yield from zip(split_hashes(part.hashes), split_hashes(part.parents), strict=True)
