"""The bytes of a paged KV cache, as engines of ours write and read them.

Three layouts of the same data. *Block-first* keeps everything of one block together, so a block is
one range: best for moving whole blocks. *Layer-first* keeps one layer's keys together, so a layer
can be sent while the next one is being computed. *Per layer* does so in a buffer for each layer, as
most engines on GPUs have it. An engine sees the same `view` either way.

Who owns which block is `pool.py`'s business; what a transfer needs to know is in `regions.py`.
"""

from __future__ import annotations

import enum
import mmap
from collections.abc import Sequence
from math import prod
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ..protocol.transfer.description import encode_fingerprint
from .regions import RegionSet

Array = npt.NDArray[Any]


class KvLayout(enum.StrEnum):
    """The order of the axes in the buffer."""

    BLOCK_FIRST = "block_first"
    """`[block, layer, K/V, slot, head, channel]`: one range a block."""
    LAYER_FIRST = "layer_first"
    """`[layer, K/V, block, slot, head, channel]`: `2 * layers` ranges a block."""
    PER_LAYER = "per_layer"
    """A buffer a layer, each `[block, K/V, slot, head, channel]`: `layers` ranges a block."""

    def parts_of(self, layers: int) -> int:
        """In how many ranges a block lies."""
        parts = {
            KvLayout.BLOCK_FIRST: 1,
            KvLayout.LAYER_FIRST: 2 * layers,
            KvLayout.PER_LAYER: layers,
        }
        return parts[self]

    def axes(self, shape: KvShape, arrays: int) -> tuple[int | None, ...] | None:
        """The lengths of the axes of each of so many arrays, None for the blocks; None: not so many."""
        block = (shape.block_tokens, shape.heads, shape.channels)
        orders: dict[tuple[KvLayout, int], tuple[int | None, ...]] = {
            (KvLayout.LAYER_FIRST, 2 * shape.layers): (None, *block),
            (KvLayout.LAYER_FIRST, 1): (shape.layers, 2, None, *block),
            (KvLayout.LAYER_FIRST, shape.layers): (2, None, *block),
            (KvLayout.PER_LAYER, shape.layers): (None, 2, *block),
            (KvLayout.BLOCK_FIRST, 1): (None, shape.layers, 2, *block),
        }
        return orders.get((self, arrays))


def _one_or_more(_: KvShape, field: attrs.Attribute[int], count: int) -> None:
    if count < 1:
        raise ValueError(f"KvShape({field.name}={count}): at least 1")


def _spelt_with_byte_order(_: KvShape, __: attrs.Attribute[str], dtype: str) -> None:
    try:
        said = np.dtype(dtype).str
    except TypeError as error:
        raise ValueError(f"KvShape(dtype={dtype!r}): numpy knows no such type") from error
    if said != dtype:
        raise ValueError(f"KvShape(dtype={dtype!r}): say {said!r}, which has the byte order")


@attrs.frozen(kw_only=True)
class KvShape:
    """What one token leaves behind, and how tokens are grouped; raises `ValueError` if none can."""

    layers: int = attrs.field(validator=_one_or_more)
    heads: int = attrs.field(validator=_one_or_more)
    """Key/value heads."""
    channels: int = attrs.field(validator=_one_or_more)
    """Of one head."""
    block_tokens: int = attrs.field(validator=_one_or_more)
    dtype: str = attrs.field(validator=_spelt_with_byte_order)
    """numpy's name with the byte order, such as `<i2`, so that bytes mean the same everywhere."""

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return self.layers * 2 * self.heads * self.channels * np.dtype(self.dtype).itemsize

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block in all layers."""
        return self.block_tokens * self.token_bytes


def fingerprint(
    engine: str, version: str, model_digest: str, shape: KvShape, layout: KvLayout
) -> str:
    """What must be equal for two engines to exchange KV bytes, as one readable line.

    `version` is that of whatever decides what the bytes are: two releases of an engine may pair
    only if they have the same.
    """
    return encode_fingerprint(
        {
            "engine": engine,
            "version": version,
            "model": model_digest,
            "dtype": shape.dtype,
            "dimensions": f"{shape.layers}x2x{shape.heads}x{shape.channels}",
            "block_tokens": shape.block_tokens,
            "layout": layout,
        }
    )


class KvMemory(RegionSet):
    """Memory for `block_count` blocks. Untouched blocks cost no physical memory.

    Raises `ValueError` for no blocks, `MemoryError` for more than the system has room for.
    """

    def __init__(
        self, shape: KvShape, block_count: int, layout: KvLayout = KvLayout.BLOCK_FIRST
    ) -> None:
        buffers, view = _allocate(shape, block_count, layout)
        parts = layout.parts_of(shape.layers)
        super().__init__(
            [each.reshape(-1).view(np.uint8).data for each in buffers],
            block_count=block_count,
            range_bytes=shape.block_bytes // parts,
            parts=parts,
            layers=shape.layers,
        )
        self.shape = shape
        self.layout = layout
        self.view: Array = view
        """`[layer, K/V, block, slot, head, channel]` whatever the layout; writes go through."""


def _zeros(axes: tuple[int, ...], dtype: str) -> Array:
    """An array of zeros in pages of its own: `calloc` takes and wipes used ones once some were freed."""
    # There are no maps of nothing; the set of regions refuses a count of 0.
    length = max(prod(axes) * np.dtype(dtype).itemsize, 1)
    try:
        pages = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"there are no {length:,} bytes for KV blocks") from error
    return np.ndarray(axes, dtype, pages)


def _allocate(shape: KvShape, block_count: int, layout: KvLayout) -> tuple[Sequence[Array], Array]:
    layers, tail = shape.layers, (shape.block_tokens, shape.heads, shape.channels)
    if layout is KvLayout.BLOCK_FIRST:
        whole = _zeros((block_count, layers, 2, *tail), shape.dtype)
        return [whole], whole.transpose(1, 2, 0, 3, 4, 5)
    if layout is KvLayout.LAYER_FIRST:
        whole = _zeros((layers, 2, block_count, *tail), shape.dtype)
        return [whole], whole
    # A block that is nobody's lies between two layers, as an allocator would leave a gap: the end
    # of one buffer is not the begin of the next.
    whole = _zeros((layers, block_count + 1, 2, *tail), shape.dtype)[:, :block_count]
    return list(whole), whole.transpose(0, 2, 1, 3, 4, 5)
