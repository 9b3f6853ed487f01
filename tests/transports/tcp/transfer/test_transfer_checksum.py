"""Which checksum two ends agree on, and that it does not matter how the bytes came."""

from __future__ import annotations

import importlib
import random
import struct
import zlib
from collections.abc import Iterator
from types import ModuleType

import pytest

from trinamo.runtime.errors import CorruptedError, RefusedError
from trinamo.runtime.protocol.transfer.description import MemoryDescription
from trinamo.transports.tcp.transfer import memory
from trinamo.transports.tcp.transfer.link import _fill
from trinamo.transports.tcp.transfer.memory import (
    STRETCH_BYTES,
    BlockFlow,
    Checksum,
    ChecksumChoice,
    TcpRegion,
    choose,
    offered,
)

CRC32 = offered("crc32")["crc32"]


@pytest.fixture
def no_xxhash(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def missing(name: str) -> ModuleType:
        raise ImportError(f"No module named {name!r}")

    memory._xxh3.cache_clear()
    monkeypatch.setattr(importlib, "import_module", missing)
    yield
    memory._xxh3.cache_clear()


def test_xxh3_is_offered_first_and_is_the_sum_that_every_xxh3_is() -> None:
    """The number is from the algorithm's own test vectors: another library must find the same."""
    assert list(offered("auto")) == ["xxh3", "crc32"]
    xxh3 = offered("auto")["xxh3"].of
    assert xxh3 is not None
    assert xxh3(b"") == 0x2D06800538D394C2


@pytest.mark.parametrize(
    ("choice", "theirs", "chosen"),
    [
        ("auto", ["aead", "xxh3", "crc32"], "aead"),
        ("auto", ["xxh3", "crc32"], "xxh3"),
        ("auto", ["crc32"], "crc32"),
        ("crc32", ["aead", "xxh3", "crc32"], "crc32"),
    ],
)
def test_sealed_blocks_are_summed_only_where_an_end_wants_it_or_is_older(
    choice: ChecksumChoice, theirs: list[str], chosen: str
) -> None:
    found = choose(theirs, choice, is_sealed=True)
    assert found.name == chosen
    assert (found.of is None) == (chosen == "aead")


def test_who_speaks_in_clear_is_never_believed_without_a_sum() -> None:
    with pytest.raises(RefusedError, match="aead there, xxh3, crc32 here"):
        choose(["aead"], "auto")


async def test_a_stream_whose_tags_are_believed_takes_no_sums() -> None:
    tags = offered("auto", is_sealed=True)["aead"]
    flow = BlockFlow(1, region(512, 4), [3, 1, 2], tags)
    flow.advance(flow.begin(3))
    with pytest.raises(CorruptedError):
        await flow.verify(bytes(24))
    await flow.verify(b"")
    assert flow.is_complete


@pytest.mark.usefixtures("no_xxhash")
def test_without_xxhash_blocks_are_summed_by_crc32() -> None:
    assert list(offered("auto")) == ["crc32"]
    assert choose(["xxh3", "crc32"], "auto").name == "crc32"
    with pytest.raises(RefusedError, match="xxh3 there, crc32 here"):
        choose(["xxh3"], "auto")


def region(block_bytes: int, blocks: int, seed: int = 1) -> TcpRegion:
    memory = bytearray(random.Random(seed).randbytes(block_bytes * blocks))
    described = MemoryDescription(
        backend="tcp",
        incarnation="i",
        region=1,
        generation=1,
        fingerprint="",
        length=len(memory),
        block_bytes=block_bytes,
    )
    return TcpRegion([memoryview(memory)], described, needs_ticket=False)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block_bytes", [1, 777, STRETCH_BYTES, STRETCH_BYTES + 5])
async def test_sums_do_not_depend_on_how_the_bytes_came(block_bytes: int, seed: int) -> None:
    """Taken as bytes come, in steps of any size, or all at the end: the same, block by block."""
    dice = random.Random(seed)
    source, order = region(block_bytes, 4), [2, 3, 0]
    at_the_end = BlockFlow(1, source, order, CRC32)
    at_the_end.pending = len(order)
    expected = await at_the_end.sums()

    stepwise = BlockFlow(2, region(block_bytes, 3, seed=9), [1, 0, 2], CRC32)
    stepwise.begin(3)
    data = b"".join(source.block(number) for number in order)
    while data:
        step = dice.randint(1, max(1, block_bytes))
        _fill(stepwise, memoryview(data[:step]))
        data = data[step:]
    await stepwise.verify(expected)

    assert stepwise.is_complete
    if block_bytes <= STRETCH_BYTES:
        assert expected == struct.pack("<3Q", *(zlib.crc32(source.block(b)) for b in order))


@pytest.mark.parametrize("damaged", range(3))
async def test_a_block_that_differs_is_named(damaged: int) -> None:
    memory = region(512, 4)
    flow = BlockFlow(1, memory, [3, 1, 2], CRC32)
    flow.advance(flow.begin(3))
    theirs = bytearray(await flow.sums())
    theirs[damaged * 8] ^= 1

    with pytest.raises(CorruptedError, match=f"block {damaged} of the transfer"):
        await flow.verify(theirs)


async def test_a_slice_is_not_summed_twice_and_the_next_one_starts_anew() -> None:
    counted: list[int] = []

    def counting(data: object) -> int:
        counted.append(memoryview(data).nbytes)  # type: ignore[arg-type]
        return len(counted)

    flow = BlockFlow(1, region(100, 6), [0, 1, 2, 3, 4, 5], Checksum("counting", counting))
    for first in (1, 4):
        flow.begin(3)
        flow.advance(150)
        # A block is summed as soon as it has moved, not one that has moved in part.
        assert len(counted) == first
        flow.advance(150)
        assert await flow.sums() == struct.pack("<3Q", first, first + 1, first + 2)
        flow.end()
    assert counted == [100] * 6
