"""The bytes of KV memory as a transfer moves them: range by range, wherever the buffers are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from trinamo.runtime.kv.memory import KvMemory
from trinamo.runtime.kv.regions import KvCache, RegionSet


def memory_of(kv: KvCache) -> KvMemory:
    """The memory of one of our engines, which has a view."""
    assert isinstance(kv.memory, KvMemory)
    return kv.memory


def buffers(memory: RegionSet) -> list[memoryview]:
    """All of them are of this process."""
    return [cast("memoryview", each) for each in memory.buffers]


def range_of(memory: RegionSet, number: int) -> memoryview:
    """The bytes of one range."""
    size = memory.range_bytes
    buffer, place = divmod(number, memory.block_count * memory.parts // len(memory.buffers))
    return buffers(memory)[buffer][place * size : (place + 1) * size]


def ranges_of(memory: RegionSet, blocks: Sequence[int]) -> Iterator[memoryview]:
    """The bytes of these blocks, a part after the other."""
    return (range_of(memory, number) for number in memory.range_ids(blocks))
