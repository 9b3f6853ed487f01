"""Where the blocks of a KV cache lie: the buffers that a transfer registers, and every block's ranges.

An engine may keep its KV in one buffer or in a list of them, such as a tensor for each layer as
vLLM and SGLang have it; in the process or on a GPU (`tensors.py`). A *range* is the bytes of
one block that lie together. Here is arithmetic only; `memory.py` has memory of its own. With who owns
which block they are a `KvCache`, as transfers need it (`kv/transfer/engine.py` registers it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import attrs
from typing_extensions import Buffer

from ..errors import RequestError
from ..planes import DeviceMemory
from .pool import BlockPool


class RegionSet:
    """`block_count` blocks, each in as many ranges of `range_bytes` as there are *parts*.

    All buffers are as long. Read through them in their order, the ranges are those of the first
    part of all blocks, then those of the second, and so on: buffers of one layer each, as
    `[block, ...]`, have a part each; buffers as `[K/V, block, ...]` have two. With more than one
    part, the parts of the first layer come first, then those of the second. Raises `ValueError`
    for parts that are no whole number for each of `layers`.
    """

    def __init__(
        self,
        buffers: Sequence[Buffer | DeviceMemory],
        *,
        block_count: int,
        range_bytes: int,
        parts: int,
        layers: int,
    ) -> None:
        if block_count < 1:
            raise ValueError(f"KV memory needs at least one block, not {block_count}")
        if parts > 1 and parts % layers:
            raise ValueError(f"blocks in {parts} parts cannot be told apart by {layers} layers")
        self.buffers = list(buffers)
        """What a transfer plane registers, as one region."""
        self.block_count = block_count
        self.range_bytes = range_bytes
        self.parts = parts
        """In how many places a block lies."""
        self.layers = layers

    def check_blocks(self, block_ids: Sequence[int], block_count: int | None = None) -> None:
        """Raise `RequestError` for blocks that are not there.

        `block_count` is that of the other side if the blocks are a peer's.
        """
        count = self.block_count if block_count is None else block_count
        wrong = next((block_id for block_id in block_ids if not 0 <= block_id < count), None)
        if wrong is not None:
            # In the middle of a buffer its ranges would be those of another block.
            raise RequestError(f"block {wrong} is not of this memory of {count} blocks")

    def range_ids(
        self,
        block_ids: Sequence[int],
        *,
        block_count: int | None = None,
        layers: range | None = None,
    ) -> list[int]:
        """The numbers of the ranges of these blocks, for a plane that calls a range a block.

        They are in an order that pairs the ranges of the first block here with those of the first
        block there: a layer after the other, and in each all blocks. `block_count` is that of the
        other side if the blocks are a peer's; its parts are the same. Only those of some `layers`,
        numbered from 0, if given. Raises `RequestError` for blocks or layers that are not there,
        and for layers of blocks that lie in one part.
        """
        self.check_blocks(block_ids, block_count)
        count = self.block_count if block_count is None else block_count
        parts: Sequence[int] = range(self.parts)
        if layers is not None:
            if self.parts == 1 and self.layers > 1:
                raise RequestError("blocks that lie in one part move whole, not layer by layer")
            wrong = next((layer for layer in layers if not 0 <= layer < self.layers), None)
            if wrong is not None:
                raise RequestError(f"layer {wrong} is not of this memory of {self.layers} layers")
            each = self.parts // self.layers
            parts = [layer * each + part for layer in layers for part in range(each)]
        return [part * count + block for part in parts for block in block_ids]

    def block_of(self, range_id: int) -> int:
        """The block that a range of this memory is a part of."""
        return range_id % self.block_count


@attrs.frozen(kw_only=True, eq=False)
class KvCache:
    """The KV memory of one engine and who owns its blocks, for as long as the engine is open."""

    memory: RegionSet
    pool: BlockPool
    """Its block ids are those of `memory`."""
    fingerprint: str
    """Equal to a peer's, or no block can be moved (`kv.memory.fingerprint`)."""


@runtime_checkable
class HoldsKv(Protocol):
    """An engine that may have KV memory."""

    @property
    def kv(self) -> KvCache | None:
        """Its cache; None if no byte of it can leave the engine."""
        ...
