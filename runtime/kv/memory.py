"""The bytes of a paged KV cache: one buffer, registered once, described as (offset, length).

Two layouts of the same data. *Block-first* keeps everything of one block together, so a block is
one range: best for moving whole blocks. *Layer-first* keeps one layer's keys together, so a layer
can be sent while the next one is being computed. An engine sees the same `view` either way.

Who owns which block is `pool.py`'s business.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ..errors import RequestError

__all__ = ["KvLayout", "KvMemory", "KvShape", "fingerprint"]


class KvLayout(enum.StrEnum):
    """The order of the axes in the buffer."""

    BLOCK_FIRST = "block_first"
    """`[block, layer, K/V, slot, head, channel]`: one range a block."""
    LAYER_FIRST = "layer_first"
    """`[layer, K/V, block, slot, head, channel]`: `2 * layers` ranges a block."""


@attrs.frozen(kw_only=True)
class KvShape:
    """What one token leaves behind, and how tokens are grouped."""

    layers: int
    heads: int
    """Key/value heads."""
    channels: int
    """Of one head."""
    block_tokens: int
    dtype: str
    """numpy's name with the byte order, such as `<i2`, so that bytes mean the same everywhere."""

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return self.layers * 2 * self.heads * self.channels * np.dtype(self.dtype).itemsize

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block in all layers."""
        return self.block_tokens * self.token_bytes


def fingerprint(engine: str, model_digest: str, shape: KvShape, layout: KvLayout) -> str:
    """What must be equal for two engines to exchange KV bytes, as one readable line.

    `engine` names the version too where it matters for the bytes.
    """
    dims = f"{shape.layers}x2x{shape.heads}x{shape.channels}"
    return f"{engine}/{model_digest}/{shape.dtype}/{dims}/{shape.block_tokens}/{layout}"


class KvMemory:
    """The buffer of `block_count` blocks. Untouched blocks cost no physical memory."""

    def __init__(
        self, shape: KvShape, block_count: int, layout: KvLayout = KvLayout.BLOCK_FIRST
    ) -> None:
        if block_count < 1:
            raise ValueError(f"KV memory needs at least one block, not {block_count}")
        self.shape = shape
        self.layout = layout
        self.block_count = block_count
        tail = (shape.block_tokens, shape.heads, shape.channels)
        if layout is KvLayout.BLOCK_FIRST:
            axes: tuple[int, ...] = (block_count, shape.layers, 2, *tail)
            order = (1, 2, 0, 3, 4, 5)
        else:
            axes = (shape.layers, 2, block_count, *tail)
            order = (0, 1, 2, 3, 4, 5)
        self._array: npt.NDArray[Any] = np.zeros(axes, dtype=shape.dtype)
        self.view: npt.NDArray[Any] = self._array.transpose(order)
        """`[layer, K/V, block, slot, head, channel]` whatever the layout; writes go through."""

    @property
    def buffer(self) -> memoryview:
        """All bytes, writable: what a transfer plane registers."""
        return self._array.reshape(-1).view(np.uint8).data

    @property
    def range_bytes(self) -> int:
        """The bytes of one block that lie together in this layout."""
        return self.shape.block_bytes // self.ranges_per_block

    @property
    def ranges_per_block(self) -> int:
        """In how many places of the buffer a block lies: 1, or `2 * layers` if layer-first."""
        return 1 if self.layout is KvLayout.BLOCK_FIRST else 2 * self.shape.layers

    def range_ids(self, block_ids: Sequence[int], block_count: int | None = None) -> list[int]:
        """The numbers of the ranges of these blocks, for a plane that calls a range a block.

        Register `buffer` with `block_bytes=range_bytes`: then these are the blocks to move, in an
        order that pairs the ranges of the first block here with those of the first block there.
        `block_count` is that of the other side if the blocks are of a peer with this layout.
        Raises `RequestError` for blocks that are not there.
        """
        count = self.block_count if block_count is None else block_count
        wrong = next((block_id for block_id in block_ids if not 0 <= block_id < count), None)
        if wrong is not None:
            # In the middle of the buffer its ranges would be those of another block.
            raise RequestError(f"block {wrong} is not of this memory of {count} blocks")
        return [p * count + b for p in range(self.ranges_per_block) for b in block_ids]

    def block_of(self, range_id: int) -> int:
        """The block that a range of this memory is a part of."""
        return range_id % self.block_count

    def descriptors(self, block_ids: Sequence[int]) -> list[tuple[int, int]]:
        """The (offset, length) ranges in bytes of these blocks, neighbours merged.

        Read one after the other they are the same sequence of bytes for any block ids that hold
        the same tokens, so two sides with the same fingerprint may place blocks as they like.
        """
        for block_id in block_ids:
            assert 0 <= block_id < self.block_count, f"block {block_id} is not of this memory"
        length = self.range_bytes
        return _merge([range_id * length for range_id in self.range_ids(block_ids)], length)


def _merge(offsets: Sequence[int], length: int) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    end = -math.inf
    for offset in offsets:
        if offset == end:
            start, merged_length = merged[-1]
            merged[-1] = (start, merged_length + length)
        else:
            merged.append((offset, length))
        end = offset + length
    return merged
