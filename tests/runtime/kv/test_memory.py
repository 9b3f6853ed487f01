"""Paged KV memory: the same view in every layout, and ranges that name its bytes."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from tests.runtime.kv.ranges import buffers, ranges_of
from tests.soak.processes import rss_bytes
from trinamo.runtime.errors import RequestError
from trinamo.runtime.kv.memory import KvLayout, KvMemory, KvShape, fingerprint
from trinamo.runtime.kv.regions import RegionSet
from trinamo.runtime.protocol.transfer.description import differences

SHAPE = KvShape(layers=3, heads=2, channels=4, block_tokens=5, dtype="<i2")
PLANE_BYTES = 5 * 2 * 4 * 2


def read(memory: KvMemory, block_ids: list[int]) -> bytes:
    """What a transfer reads of these blocks."""
    return b"".join(ranges_of(memory, block_ids))


def test_untouched_blocks_cost_no_memory_though_others_were_freed_before() -> None:
    """An allocator gives again what was freed once a larger piece was, and wipes each byte of it."""
    pool_bytes = 16 << 20
    blocks = pool_bytes // SHAPE.block_bytes
    KvMemory(SHAPE, blocks * 3 // 2)  # freed at once
    before = rss_bytes(os.getpid())
    used = [KvMemory(SHAPE, blocks) for _ in range(8)]
    for number in range(8):
        used[number].view[:] = 1
    del used[:7]
    unused = [KvMemory(SHAPE, blocks) for _ in range(7)]
    assert rss_bytes(os.getpid()) - before < 2 * pool_bytes
    assert not any(each.view[0, 0, 0].any() for each in unused)


def test_a_block_is_one_range_when_blocks_come_first() -> None:
    memory = KvMemory(SHAPE, 4, KvLayout.BLOCK_FIRST)
    assert memory.range_ids([2]) == [2]
    assert memory.range_bytes == SHAPE.block_bytes == 6 * PLANE_BYTES


def test_a_block_is_a_range_per_plane_when_layers_come_first() -> None:
    memory = KvMemory(SHAPE, 4, KvLayout.LAYER_FIRST)
    assert memory.range_ids([2]) == [plane * 4 + 2 for plane in range(6)]
    assert memory.range_bytes == PLANE_BYTES


def test_a_block_is_a_range_in_each_of_as_many_buffers_as_there_are_layers() -> None:
    memory = KvMemory(SHAPE, 4, KvLayout.PER_LAYER)
    assert memory.range_ids([2]) == [2, 4 + 2, 8 + 2]
    assert [each.nbytes for each in buffers(memory)] == [4 * 2 * PLANE_BYTES] * 3


def test_buffers_of_two_layers_do_not_touch() -> None:
    """Else whoever computes an address from the first buffer alone would be right by chance."""
    memory = KvMemory(SHAPE, 4, KvLayout.PER_LAYER)
    starts = [np.frombuffer(each, "u1").ctypes.data for each in buffers(memory)]
    assert min(b - a for a, b in itertools.pairwise(starts)) > 4 * 2 * PLANE_BYTES


@pytest.mark.parametrize("layout", KvLayout)
def test_all_buffers_together_hold_all_blocks_and_nothing_else(layout: KvLayout) -> None:
    memory = KvMemory(SHAPE, 4, layout)
    assert sum(each.nbytes for each in buffers(memory)) == 4 * SHAPE.block_bytes
    assert KvMemory(SHAPE, 4, layout).range_ids([]) == []


@pytest.mark.parametrize("layout", KvLayout)
def test_ranges_read_in_order_are_the_same_bytes_wherever_the_blocks_lie(layout: KvLayout) -> None:
    here, there = KvMemory(SHAPE, 6, layout), KvMemory(SHAPE, 9, layout)
    numbers = np.arange(here.view[:, :, :2].size).reshape(here.view[:, :, :2].shape)
    here.view[:, :, [4, 1]] = numbers
    there.view[:, :, [2, 3]] = numbers
    assert read(here, [4, 1]) == read(there, [2, 3])


@pytest.mark.parametrize("layout", KvLayout)
def test_the_view_writes_through_to_the_buffers(layout: KvLayout) -> None:
    memory = KvMemory(SHAPE, 4, layout)
    memory.view[1, 0, 3] = 7
    data = np.frombuffer(read(memory, [3]), dtype="<i2").reshape(3, 2, 5, 2, 4)
    assert data[1, 0].tolist() == np.full((5, 2, 4), 7).tolist()
    assert not data[0].any()
    assert not any(read(memory, [0, 1, 2]))


@pytest.mark.parametrize("layout", [KvLayout.LAYER_FIRST, KvLayout.PER_LAYER])
def test_the_ranges_of_a_layer_are_those_of_its_keys_and_values(layout: KvLayout) -> None:
    memory = KvMemory(SHAPE, 4, layout)
    of_layers = [memory.range_ids([3, 1], layers=range(n, n + 1)) for n in range(3)]
    assert [number for ranges in of_layers for number in ranges] == memory.range_ids([3, 1])
    assert {len(ranges) for ranges in of_layers} == {2 * memory.parts // 3}


def test_layers_and_blocks_that_are_not_there_are_refused() -> None:
    memory = KvMemory(SHAPE, 4, KvLayout.PER_LAYER)
    with pytest.raises(RequestError, match="layer 3 is not of this memory of 3 layers"):
        memory.range_ids([1], layers=range(2, 4))
    with pytest.raises(RequestError, match="block 4 is not of this memory of 4 blocks"):
        memory.range_ids([4])
    with pytest.raises(RequestError, match="block 2 is not of this memory of 2 blocks"):
        memory.range_ids([2], block_count=2)
    with pytest.raises(RequestError, match="move whole"):
        KvMemory(SHAPE, 4).range_ids([1], layers=range(1))


def test_memory_that_cannot_be_is_not_made() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        KvMemory(SHAPE, 0)
    for blocks in (1 << 44, 1 << 60):  # more than the kernel maps, and than a size can be
        with pytest.raises(MemoryError, match="bytes for KV blocks"):
            KvMemory(SHAPE, blocks)
    with pytest.raises(ValueError, match="3 parts cannot be told apart by 2 layers"):
        RegionSet([bytearray(6)], block_count=2, range_bytes=1, parts=3, layers=2)


def test_the_fingerprint_tells_everything_that_must_agree() -> None:
    assert (
        fingerprint("exact", "1", "abcd", SHAPE, KvLayout.BLOCK_FIRST)
        == "engine=exact version=1 model=abcd dtype=<i2 dimensions=3x2x2x4 block_tokens=5"
        " layout=block_first"
    )
    with pytest.raises(ValueError, match="white space"):
        fingerprint("exact", "1 or 2", "abcd", SHAPE, KvLayout.BLOCK_FIRST)


def test_what_differs_between_two_fingerprints_is_named() -> None:
    one = fingerprint("exact", "1", "abcd", SHAPE, KvLayout.BLOCK_FIRST)
    other = fingerprint("exact", "2", "abcd", SHAPE, KvLayout.PER_LAYER)
    assert differences(one, one) == ""
    assert (
        differences(one, other)
        == "version 1 here, 2 there; layout block_first here, per_layer there"
    )
    assert differences("a=1", "a=1 b=2") == "b none here, 2 there"
    assert differences("pages", "sheets") == " pages here, sheets there"
