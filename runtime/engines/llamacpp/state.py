"""The KV of one sequence as llama.cpp writes it, cut into blocks and put together again.

llama.cpp keeps KV in cells of its own, which no transfer can reach. What it has of one sequence it
writes as a *blob*, and takes back; here the rows of a blob are copied to and from the blocks of a
`KvMemory`, which may lie anywhere. Sans-IO: bytes in, bytes out.

The format is private to the version of llama.cpp that cyllama brings, so that version is a part of the
KV's fingerprint, and a golden test holds it. Little endian:

    magic u32, sequence i32, streams u32 (1), cells u32
    for each cell: position i32, sequences u32 (1), sequence i32
    transposed u32 (0), layers u32
    for each layer's keys, then each layer's values: type i32 (1: f16), bytes a row u64, a row a cell

Without flash attention values are transposed; then, and wherever layers differ, no block can be made.
"""

from __future__ import annotations

import importlib.metadata
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from ...kv.memory import KvLayout, KvMemory, KvShape, fingerprint

DTYPE: Final = "<f2"
_F16: Final = 1
_HEADER: Final = struct.Struct("<IiII")
_CELL_BYTES: Final = 12
_SHAPE: Final = struct.Struct("<II")
_PLANE: Final = struct.Struct("<iQ")

Array = npt.NDArray[Any]


@attrs.frozen(kw_only=True)
class SequenceFormat:
    """What all blobs of one context have in common."""

    magic: int
    layers: int
    row_bytes: int
    """Keys, or values, of one token in one layer."""

    @classmethod
    def of(cls, blob: bytes) -> SequenceFormat:
        """As a blob of at least one cell shows it; `ValueError` says why no blocks can be made."""
        try:
            magic, _, streams, cells = _HEADER.unpack_from(blob)
            at = _HEADER.size + cells * _CELL_BYTES
            is_transposed, layers = _SHAPE.unpack_from(blob, at)
            kind, row_bytes = _PLANE.unpack_from(blob, at + _SHAPE.size)
        except struct.error as error:
            raise ValueError(f"a sequence's state of {len(blob)} bytes is cut short") from error
        if streams != 1 or is_transposed:
            raise ValueError("values are kept transposed, as without flash attention")
        if kind != _F16:
            raise ValueError(f"KV is kept as type {kind} of llama.cpp's, not as f16")
        found = cls(magic=magic, layers=layers, row_bytes=row_bytes)
        found._planes(np.frombuffer(blob, np.uint8), cells)
        return found

    def shape(self, heads: int, block_tokens: int) -> KvShape:
        """That of the blocks; `ValueError` if a row is not that of `heads` key/value heads."""
        channels, rest = divmod(self.row_bytes, heads * np.dtype(DTYPE).itemsize)
        if rest:
            raise ValueError(f"rows of {self.row_bytes} bytes are not of {heads} heads")
        return KvShape(
            layers=self.layers,
            heads=heads,
            channels=channels,
            block_tokens=block_tokens,
            dtype=DTYPE,
        )

    def save(self, blob: bytes, memory: KvMemory, block_ids: Sequence[int], tokens: int) -> None:
        """Copy the first `tokens` positions of a blob into blocks, the last filled in part.

        Raises `ValueError` for a blob that has not all of them, or another format.
        """
        magic, _, streams, cells = _HEADER.unpack_from(blob)
        if magic != self.magic or streams != 1 or cells < tokens:
            raise ValueError(f"a sequence's state has {cells} of {tokens} positions")
        data = np.frombuffer(blob, np.uint8)
        rows = self._planes(data, cells)
        places = data[_HEADER.size :][: cells * _CELL_BYTES].view("<i4").reshape(cells, 3)
        if (places[:, 1] != 1).any():
            raise ValueError("positions are shared with other sequences")
        # Cells are in the order in which they were free, not in that of the positions.
        order = np.argsort(places[:, 0])[:tokens]
        if (places[order, 0] != np.arange(tokens)).any():
            raise ValueError(f"a sequence's state has not the positions up to {tokens}")
        if (order != np.arange(tokens)).any():
            rows = rows[:, :, order]
        for positions, block in _blocks(memory, block_ids, tokens):
            block[:] = rows[:, :, positions].reshape(block.shape)

    def blob(self, slot: int, memory: KvMemory, block_ids: Sequence[int], tokens: int) -> bytes:
        """A blob of the first `tokens` positions in these blocks, for the sequence in `slot`."""
        head = _HEADER.pack(self.magic, slot, 1, tokens)
        places = np.empty((tokens, 3), "<i4")
        places[:] = 0, 1, slot
        places[:, 0] = np.arange(tokens)
        head += places.tobytes() + _SHAPE.pack(0, self.layers)
        plane_bytes = _PLANE.size + tokens * self.row_bytes
        data = np.empty(len(head) + 2 * self.layers * plane_bytes, np.uint8)
        data[: len(head)] = np.frombuffer(head, np.uint8)
        planes = data[len(head) :].reshape(-1, plane_bytes)
        planes[:, : _PLANE.size] = np.frombuffer(_PLANE.pack(_F16, self.row_bytes), np.uint8)
        rows = self._planes(data, tokens)
        for positions, block in _blocks(memory, block_ids, tokens):
            into = rows[:, :, positions]
            into[:] = block.reshape(into.shape)
        return data.tobytes()

    def _planes(self, data: Array, cells: int) -> Array:
        """The rows as `[K/V, layer, cell, value]`, as a view of a blob; `ValueError`."""
        at = _HEADER.size + cells * _CELL_BYTES + _SHAPE.size
        plane_bytes = _PLANE.size + cells * self.row_bytes
        if len(data) != at + 2 * self.layers * plane_bytes:
            raise ValueError("the layers of the model keep KV of different sizes")
        planes = data[at:].reshape(2 * self.layers, plane_bytes)
        head = np.frombuffer(_PLANE.pack(_F16, self.row_bytes), np.uint8)
        if (planes[:, : _PLANE.size] != head).any():
            raise ValueError("the layers of the model keep KV of different sizes or types")
        rows = planes[:, _PLANE.size :].view(DTYPE)
        return rows.reshape(2, self.layers, cells, -1)


def _blocks(
    memory: KvMemory, block_ids: Sequence[int], tokens: int
) -> Iterator[tuple[slice, Array]]:
    """Which positions each block holds, and their `[K/V, layer, slot, head, channel]`."""
    size = memory.shape.block_tokens
    for first, block_id in zip(range(0, tokens, size), block_ids, strict=False):
        count = min(size, tokens - first)
        block = memory.view[:, :, block_id, :count].transpose(1, 0, 2, 3, 4)
        yield slice(first, first + count), block


_EVERY = -1


class StagedBlocks:
    """`block_count` blocks, and how to copy one sequence of a context to or from them.

    Raises `ValueError`, which says why, for a model or context whose KV cannot be cut into blocks.
    Its pages are taken from the system as blocks are first filled.
    """

    def __init__(
        self,
        context: Any,
        batch: Any,
        *,
        heads: int,
        block_tokens: int,
        block_count: int,
        layout: KvLayout,
    ) -> None:
        self._context = context
        # What the KV of a context looks like is seen in that of any token.
        batch.clear()
        batch.add(0, 0, [0], False)  # noqa: FBT003 -- no logits of it
        context.decode(batch)
        try:
            self._format = SequenceFormat.of(context.get_state_seq_data(0))
        finally:
            context.memory_seq_rm(0, _EVERY, _EVERY)
        self.memory = KvMemory(self._format.shape(heads, block_tokens), block_count, layout)

    def fingerprint(self, model_digest: str) -> str:
        """What a peer's must be; llama.cpp's format is private to each of cyllama's versions."""
        version = importlib.metadata.version("cyllama")
        return fingerprint("llamacpp", version, model_digest, self.memory.shape, self.memory.layout)

    def save(self, slot: int, tokens: int, block_ids: Sequence[int]) -> None:
        """See `StagesKv.save`."""
        blob = self._context.get_state_seq_data(slot)
        self._format.save(blob, self.memory, block_ids, tokens)

    def load(self, slot: int, tokens: int, block_ids: Sequence[int]) -> None:
        """See `StagesKv.load`."""
        blob = self._format.blob(slot, self.memory, block_ids, tokens)
        self._context.set_state_seq_data(blob, slot)
