"""The blob of one sequence, cut into blocks: golden bytes, and what no blocks can be made of."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from trinamo.runtime.engines.llamacpp.state import SequenceFormat
from trinamo.runtime.kv.memory import KvLayout, KvMemory

# Two layers of one head of two channels; three cells of the sequence in slot 5.
HEADER = "d83c14af 05000000 01000000 03000000"
CELLS = "00000000 01000000 05000000  01000000 01000000 05000000  02000000 01000000 05000000"
LAYERS = "00000000 02000000"
PLANE = "01000000 0400000000000000"
KEYS = [f"{PLANE} 0001 0101  0201 0301  0401 0501", f"{PLANE} 0002 0102  0202 0302  0402 0502"]
VALUES = [f"{PLANE} 0003 0103  0203 0303  0403 0503", f"{PLANE} 0004 0104  0204 0304  0404 0504"]
BLOB = bytes.fromhex(" ".join([HEADER, CELLS, LAYERS, *KEYS, *VALUES]))


def pool(layout: KvLayout = KvLayout.BLOCK_FIRST) -> KvMemory:
    return KvMemory(SequenceFormat.of(BLOB).shape(heads=1, block_tokens=2), 4, layout)


def test_a_blob_says_what_its_context_keeps() -> None:
    found = SequenceFormat.of(BLOB)
    assert found == SequenceFormat(magic=0xAF143CD8, layers=2, row_bytes=4)
    shape = found.shape(heads=1, block_tokens=2)
    assert (shape.layers, shape.heads, shape.channels, shape.dtype) == (2, 1, 2, "<f2")


@pytest.mark.parametrize("layout", KvLayout)
def test_a_blob_comes_back_from_its_blocks_byte_by_byte(layout: KvLayout) -> None:
    memory = pool(layout)
    found = SequenceFormat.of(BLOB)
    found.save(BLOB, memory, [3, 1], 3)
    assert found.blob(5, memory, [3, 1], 3) == BLOB
    shown = memory.view.view("<u2")[..., 0, :]
    assert shown[0, 0, 3].tolist() == [[0x0100, 0x0101], [0x0102, 0x0103]]
    assert shown[1, 1, 1].tolist() == [[0x0404, 0x0405], [0, 0]]


def test_cells_that_are_out_of_order_are_put_into_that_of_the_positions() -> None:
    found, memory, straight = SequenceFormat.of(BLOB), pool(), pool()
    found.save(BLOB, straight, [0, 1], 3)
    mixed = bytearray(BLOB)
    for place, position in ((0, 2), (2, 0)):
        struct.pack_into("<i", mixed, 16 + 12 * place, position)
    at = 16 + 36 + 8
    for _ in range(4):
        rows = mixed[at + 12 : at + 24]
        mixed[at + 12 : at + 24] = rows[8:] + rows[4:8] + rows[:4]
        at += 24
    found.save(bytes(mixed), memory, [0, 1], 3)
    assert np.array_equal(memory.view, straight.view)


def test_positions_that_are_not_there_are_not_made_up() -> None:
    found, memory = SequenceFormat.of(BLOB), pool()
    with pytest.raises(ValueError, match="3 of 4 positions"):
        found.save(BLOB, memory, [0, 1], 4)
    for word, why in ((0, "not the positions"), (1, "shared")):
        wrong = bytearray(BLOB)
        struct.pack_into("<i", wrong, 16 + 12 + 4 * word, 7)
        with pytest.raises(ValueError, match=why):
            found.save(bytes(wrong), memory, [0, 1], 3)
    assert not memory.view.any()


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (8, 2, "transposed"),
        (16 + 36, 1, "transposed"),
        (16 + 36 + 8, 0, "type 0"),
        (16 + 36 + 8 + 24, 8, "sizes or types"),
        (16 + 36 + 8 + 4, 8, "different sizes"),
        (16 + 36 + 4, 3, "different sizes"),
        (12, 1 << 30, "cut short"),
    ],
)
def test_what_cannot_be_cut_into_blocks_is_refused_with_a_reason(
    at: int, value: int, why: str
) -> None:
    wrong = bytearray(BLOB)
    struct.pack_into("<I", wrong, at, value)
    with pytest.raises(ValueError, match=why):
        SequenceFormat.of(bytes(wrong))


def test_rows_that_are_not_of_the_models_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="not of 3 heads"):
        SequenceFormat.of(BLOB).shape(heads=3, block_tokens=2)
