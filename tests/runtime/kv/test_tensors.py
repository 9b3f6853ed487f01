"""Buffers and tensors that are there already become KV memory, without a copy."""

from __future__ import annotations

import mmap
from typing import Any

import attrs
import numpy as np
import pytest
import trio

import trinamo
from tests.runtime.one_process import OneProcess, open_process
from trinamo import KvLayout, KvMemory, KvShape
from trinamo.runtime.planes import DeviceMemory

SHAPE = KvShape(layers=2, heads=2, channels=4, block_tokens=4, dtype="<f2")
BLOCKS = 6
BYTES = BLOCKS * SHAPE.block_bytes


class Tensor:
    """As a tensor of this machine's memory: no buffer, but DLPack."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __dlpack__(self, **given: Any) -> Any:
        return self._array.__dlpack__(**given)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class OnGpu:
    """As an array on GPU 3."""

    def __init__(self, length: int, typestr: str = "|u1") -> None:
        said = {"shape": (length,), "typestr": typestr, "data": (0x7000_0000, False), "version": 3}
        self.__cuda_array_interface__ = said

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 3)


def layers() -> list[np.ndarray[Any, Any]]:
    return [np.zeros(BYTES // 4, "<f2") for _ in range(2)]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((BLOCKS, SHAPE.block_bytes), np.uint8),
        bytearray(BYTES),
        memoryview(bytearray(BYTES)),
        mmap.mmap(-1, BYTES),
        Tensor(np.zeros(BYTES // 2, np.float16)),
    ],
    ids=lambda array: type(array).__name__,
)
def test_one_array_of_any_kind_holds_its_blocks_whole(array: Any) -> None:
    cache = trinamo.kv_cache(array, SHAPE)

    assert (cache.memory.block_count, cache.memory.parts) == (BLOCKS, 1)
    assert cache.pool.take(BLOCKS) is not None
    # Written through the cache, it is seen in the array.
    memoryview(cache.memory.buffers[0])[0] = 7  # type: ignore[arg-type]
    seen: Any = np.from_dlpack(array).view(np.uint8) if isinstance(array, Tensor) else array
    assert memoryview(seen).cast("B")[0] == 7


@pytest.mark.parametrize(
    ("layout", "parts"), [(None, 2), (KvLayout.PER_LAYER, 2), ("layer_first", 4)]
)
def test_a_tensor_a_layer_is_one_region_in_parts(layout: str | None, parts: int) -> None:
    memory = trinamo.kv_cache(layers(), SHAPE, layout=layout).memory

    assert (len(memory.buffers), memory.block_count, memory.parts) == (2, BLOCKS, parts)
    assert memory.range_bytes * parts == SHAPE.block_bytes


def test_it_pairs_with_memory_of_ours_of_the_same_layout() -> None:
    ours = KvMemory(SHAPE, BLOCKS, KvLayout.PER_LAYER)
    theirs = trinamo.kv_cache(layers(), SHAPE).memory

    assert theirs.range_ids([1, 4]) == ours.range_ids([1, 4])
    assert (theirs.range_bytes, theirs.parts) == (ours.range_bytes, ours.parts)


def test_only_caches_that_say_the_same_exchange_blocks() -> None:
    said = [
        trinamo.kv_cache(layers(), SHAPE, model="a").fingerprint,
        trinamo.kv_cache(layers(), SHAPE, model="b").fingerprint,
        trinamo.kv_cache(layers(), SHAPE, model="a", layout="layer_first").fingerprint,
        trinamo.kv_cache(layers(), SHAPE, model="a", version="2").fingerprint,
    ]

    assert len(set(said)) == 4
    assert trinamo.kv_cache(layers(), SHAPE, model="a").fingerprint == said[0]


def test_arrays_of_a_gpu_say_where_they_are() -> None:
    cache = trinamo.kv_cache(OnGpu(BYTES), SHAPE, synchronize=lambda: None)

    (memory,) = cache.memory.buffers
    assert isinstance(memory, DeviceMemory)
    assert (memory.address, memory.length, memory.device) == (0x7000_0000, BYTES, 3)


@pytest.mark.parametrize(
    ("tensors", "given", "words"),
    [
        (bytearray(BYTES + 1), {}, "no whole number of blocks"),
        (bytearray(0), {}, "no whole number of blocks"),
        (bytes(BYTES), {}, "writable"),
        (np.zeros((BYTES, 2), np.uint8)[:, 0], {}, "contiguous"),
        (memoryview(bytearray(2 * BYTES))[::2], {}, "contiguous"),
        ([bytearray(BYTES), bytearray(8)], {}, "different lengths"),
        ([], {}, "0 arrays: per_layer of 2 layers has one array a layer"),
        ([bytearray(SHAPE.block_bytes // 4)] * 4, {}, "4 arrays: per_layer of 2 layers"),
        ([np.zeros(BYTES, np.uint8)], {"layout": "per_layer"}, "1 arrays"),
        ([np.zeros(BYTES // 2, "<f2")] * 2, {"layout": "block_first"}, "has one array"),
        ([np.zeros(BYTES // 4, "<f4")] * 2, {}, "an array of '<f4', but the shape says '<f2'"),
        (Tensor(np.zeros(BYTES // 4, np.float32)), {}, "the shape says '<f2'"),
        ([np.zeros((6, 2, 4, 2, 2), "<f2")] * 2, {}, r"say \(blocks, 2, 4, 2, 4\)"),
        (np.zeros((2, 6, 2, 4, 2, 4), "<f2"), {}, r"say \(blocks, 2, 2, 4, 2, 4\)"),
        ([np.zeros((6, 2, 4, 2, 4), "<f2")] * 2, {"layout": "layer_first"}, "an array of axes"),
        # One layer's array, where the shape has several.
        (np.zeros((6, 2, 4, 2, 4), "<f2"), {}, "an array of axes"),
        (OnGpu(BYTES // 4, "<f4"), {"synchronize": print}, "an array of '<f4'"),
        (OnGpu(BYTES), {}, "need `synchronize`"),
        ("text", {}, "neither a buffer nor a tensor"),
    ],
)
def test_what_is_no_kv_memory_of_that_shape_is_a_sentence(
    tensors: Any, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        trinamo.kv_cache(tensors, SHAPE, **given)


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        ("block_first", [(6, 2, 2, 4, 2, 4)]),
        ("per_layer", [(6, 2, 4, 2, 4)] * 2),
        ("layer_first", [(2, 6, 4, 2, 4)] * 2),
        ("layer_first", [(2, 2, 6, 4, 2, 4)]),
        ("layer_first", [(6, 4, 2, 4)] * 4),
    ],
)
def test_arrays_of_the_axes_of_their_layout_are_taken(
    layout: str, axes: list[tuple[int, ...]]
) -> None:
    arrays = [np.zeros(each, "<f2") for each in axes]
    memory = trinamo.kv_cache(arrays, SHAPE, layout=layout).memory
    assert memory.block_count == BLOCKS


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 0}, r"layers=0.*at least 1"),
        ({"block_tokens": -1}, "at least 1"),
        ({"dtype": "float16"}, "say '<f2', which has the byte order"),
        ({"dtype": "bfloat17"}, "numpy knows no such type"),
    ],
)
def test_a_shape_that_cannot_be_is_a_sentence(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        attrs.evolve(SHAPE, **change)


async def test_blocks_move_between_tensors_of_two_processes() -> None:
    lent, taken = layers(), layers()
    for number, layer in enumerate(lent):
        layer.reshape(BLOCKS, -1)[2] = number + 1
    owner_kv, reader_kv = (trinamo.kv_cache(each, SHAPE, model="m") for each in (lent, taken))
    transports = OneProcess()
    with trio.fail_after(120):
        async with (
            open_process(transports, serving=True, kv=owner_kv) as owner,
            open_process(transports, serving=True, kv=reader_kv) as reader,
        ):
            assert owner.transfers is not None
            assert reader.transfers is not None
            assert owner_kv.pool.take(BLOCKS) is not None
            assert reader_kv.pool.take(BLOCKS) is not None
            async with owner.transfers.grant([2]) as grant:
                engine_id = owner.transfers.engine_id
                await reader.transfers.read(engine_id, [5], [2], ticket=grant.ticket)

    assert [layer.reshape(BLOCKS, -1)[5].tolist() for layer in taken] == [
        [number + 1.0] * (BYTES // 4 // BLOCKS) for number in range(2)
    ]
