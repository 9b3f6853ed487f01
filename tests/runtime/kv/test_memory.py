"""Paged KV memory: the same view in both layouts, and ranges that name its bytes."""

from __future__ import annotations

import numpy as np
import pytest

from trinamo.runtime.kv.memory import KvLayout, KvMemory, KvShape, fingerprint

SHAPE = KvShape(layers=3, heads=2, channels=4, block_tokens=5, dtype="<i2")
PLANE_BYTES = 5 * 2 * 4 * 2


def read(memory: KvMemory, block_ids: list[int]) -> bytes:
    return b"".join(
        bytes(memory.buffer[offset : offset + length])
        for offset, length in memory.descriptors(block_ids)
    )


def test_a_block_is_one_range_when_blocks_come_first() -> None:
    memory = KvMemory(SHAPE, 4, KvLayout.BLOCK_FIRST)
    assert memory.descriptors([2]) == [(2 * SHAPE.block_bytes, SHAPE.block_bytes)]
    assert SHAPE.block_bytes == 6 * PLANE_BYTES


def test_a_block_is_a_range_per_plane_when_layers_come_first() -> None:
    memory = KvMemory(SHAPE, 4, KvLayout.LAYER_FIRST)
    assert memory.descriptors([2]) == [
        ((plane * 4 + 2) * PLANE_BYTES, PLANE_BYTES) for plane in range(6)
    ]


def test_neighbouring_blocks_are_one_range() -> None:
    memory = KvMemory(SHAPE, 8, KvLayout.BLOCK_FIRST)
    size = SHAPE.block_bytes
    assert memory.descriptors([3, 4, 5, 1, 7, 6]) == [
        (3 * size, 3 * size),
        (size, size),
        (7 * size, size),
        (6 * size, size),
    ]


@pytest.mark.parametrize("layout", KvLayout)
def test_all_blocks_in_order_are_the_whole_buffer(layout: KvLayout) -> None:
    memory = KvMemory(SHAPE, 4, layout)
    assert memory.descriptors(range(4)) == [(0, 4 * SHAPE.block_bytes)]
    assert memory.buffer.nbytes == 4 * SHAPE.block_bytes


def test_no_blocks_are_no_ranges() -> None:
    assert KvMemory(SHAPE, 4).descriptors([]) == []


@pytest.mark.parametrize("layout", KvLayout)
def test_ranges_read_in_order_are_the_same_bytes_wherever_the_blocks_lie(layout: KvLayout) -> None:
    here, there = KvMemory(SHAPE, 6, layout), KvMemory(SHAPE, 9, layout)
    numbers = np.arange(here.view[:, :, :2].size).reshape(here.view[:, :, :2].shape)
    here.view[:, :, [4, 1]] = numbers
    there.view[:, :, [2, 3]] = numbers
    assert read(here, [4, 1]) == read(there, [2, 3])


@pytest.mark.parametrize("layout", KvLayout)
def test_the_view_writes_through_to_the_buffer(layout: KvLayout) -> None:
    memory = KvMemory(SHAPE, 4, layout)
    memory.view[1, 0, 3] = 7
    data = np.frombuffer(read(memory, [3]), dtype="<i2").reshape(3, 2, 5, 2, 4)
    assert data[1, 0].tolist() == np.full((5, 2, 4), 7).tolist()
    assert not data[0].any()
    assert not any(read(memory, [0, 1, 2]))


def test_a_block_that_is_not_there_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="not of this memory"):
        KvMemory(SHAPE, 4).descriptors([4])


def test_memory_without_blocks_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        KvMemory(SHAPE, 0)


def test_the_fingerprint_tells_everything_that_must_agree() -> None:
    assert (
        fingerprint("exact", "abcd", SHAPE, KvLayout.BLOCK_FIRST)
        == "exact/abcd/<i2/3x2x2x4/5/block_first"
    )
