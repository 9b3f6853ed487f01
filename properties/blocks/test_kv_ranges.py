"""A pool that keeps layers apart moves block by block: ranges of one block are no other block's."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from tests.runtime.kv.ranges import buffers, range_of
from trinamo.runtime.kv.memory import KvLayout, KvMemory, KvShape


@st.composite
def shapes(draw: st.DrawFn) -> KvShape:
    return KvShape(
        layers=draw(st.integers(1, 4)),
        heads=draw(st.integers(1, 2)),
        channels=draw(st.sampled_from([2, 4])),
        block_tokens=draw(st.integers(1, 3)),
        dtype="<i2",
    )


def noise(shape: KvShape, block_count: int, layout: KvLayout, seed: int) -> KvMemory:
    memory = KvMemory(shape, block_count, layout)
    memory.view[:] = np.random.default_rng(seed).integers(-32_768, 32_767, memory.view.shape)
    return memory


@settings(max_examples=100, deadline=None)
@given(data=st.data(), shape=shapes(), layout=st.sampled_from(KvLayout))
def test_ranges_copied_pairwise_are_blocks_copied_whole(
    data: st.DataObject, shape: KvShape, layout: KvLayout
) -> None:
    """What a transfer of `range_ids` moves is exactly the named blocks, whatever the pools' sizes."""
    ours = noise(shape, data.draw(st.integers(1, 6), "our blocks"), layout, 1)
    theirs = noise(shape, data.draw(st.integers(1, 6), "their blocks"), layout, 2)
    count = data.draw(st.integers(0, min(ours.block_count, theirs.block_count)), "moved")
    here = data.draw(st.permutations(range(ours.block_count)), "here")[:count]
    there = data.draw(st.permutations(range(theirs.block_count)), "there")[:count]
    layers: range | None = None
    if layout is not KvLayout.BLOCK_FIRST and data.draw(st.booleans(), "some layers only"):
        first = data.draw(st.integers(0, shape.layers - 1), "first layer")
        layers = range(first, data.draw(st.integers(first, shape.layers), "layers until"))
    expected = ours.view.copy()
    for layer in range(shape.layers) if layers is None else layers:
        expected[layer][:, here] = theirs.view[layer][:, there]

    assert ours.range_bytes == theirs.range_bytes
    ranges = (
        ours.range_ids(here, layers=layers),
        ours.range_ids(there, block_count=theirs.block_count, layers=layers),
    )
    assert ranges[1] == theirs.range_ids(there, layers=layers)
    for a, b in zip(*ranges, strict=True):
        range_of(ours, a)[:] = range_of(theirs, b)

    assert np.array_equal(ours.view, expected)


@given(shape=shapes(), layout=st.sampled_from(KvLayout), block_count=st.integers(1, 6))
def test_every_range_is_part_of_one_block(
    shape: KvShape, layout: KvLayout, block_count: int
) -> None:
    """The ranges of all blocks are all buffers, each once, and `block_of` finds its block."""
    memory = KvMemory(shape, block_count, layout)
    of_blocks = {block: memory.range_ids([block]) for block in range(block_count)}
    everything = sorted(each for ranges in of_blocks.values() for each in ranges)

    length = sum(each.nbytes for each in buffers(memory))
    assert everything == list(range(length // memory.range_bytes))
    for block, ranges in of_blocks.items():
        assert len(ranges) == memory.parts
        assert {memory.block_of(each) for each in ranges} == {block}
