"""What is on the disk of a taker, and what of it is believed after a crash."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

from tests.runtime.weights.lending import CHUNK, inline, listed
from trinamo.runtime.errors import CorruptedError
from trinamo.runtime.weights.files import PartialFile, manifest_of, open_partial, read_chunk
from trinamo.runtime.weights.messages import Manifest

DATA = random.Random(3).randbytes(CHUNK * 3 + 5)


@pytest.fixture
async def manifest(tmp_path: Path) -> Manifest:
    source = tmp_path / "source"
    source.write_bytes(DATA)
    return await manifest_of(source, CHUNK, inline)


def piece(manifest: Manifest, chunk: int) -> memoryview:
    start = chunk * CHUNK
    return memoryview(DATA)[start : start + manifest.length(chunk)]


async def append(partial: PartialFile, manifest: Manifest, *chunks: int) -> None:
    for chunk in chunks:
        await partial.append(piece(manifest, chunk))


async def test_a_beginning_is_gone_on_with_after_a_crash(
    manifest: Manifest, tmp_path: Path
) -> None:
    target = tmp_path / "model"
    async with open_partial(target, manifest.sha256, inline) as partial:
        assert partial is not None
        await partial.begin(manifest)
        await append(partial, manifest, 0, 1)
    async with open_partial(target, manifest.sha256, inline) as partial:
        assert partial is not None
        await partial.begin(manifest)
        assert (partial.count, partial.byte_count, partial.is_complete) == (2, 2 * CHUNK, False)
        await append(partial, manifest, 2, 3)
        assert partial.is_complete
        await partial.commit()
    assert target.read_bytes() == DATA
    async with open_partial(target, manifest.sha256, inline) as partial:
        assert partial is None
    assert listed(tmp_path) == ["model", "source"]


@pytest.mark.parametrize("at", [0, CHUNK, 2 * CHUNK - 1])
async def test_what_the_disk_has_lost_is_taken_again(
    manifest: Manifest, tmp_path: Path, at: int
) -> None:
    target = tmp_path / "model"
    async with open_partial(target, manifest.sha256, inline) as partial:
        assert partial is not None
        await partial.begin(manifest)
        await append(partial, manifest, 0, 1, 2)
    part = tmp_path / listed(tmp_path)[0]
    data = bytearray(part.read_bytes())
    data[at] ^= 1
    part.write_bytes(data)
    async with open_partial(target, manifest.sha256, inline) as partial:
        assert partial is not None
        await partial.begin(manifest)
        assert partial.count == at // CHUNK
        assert part.stat().st_size == partial.byte_count


async def test_a_holder_with_other_chunks_goes_on_with_the_same_bytes(
    manifest: Manifest, tmp_path: Path
) -> None:
    other = await manifest_of(tmp_path / "source", CHUNK * 2, inline)
    async with open_partial(tmp_path / "model", manifest.sha256, inline) as partial:
        assert partial is not None
        await partial.begin(manifest)
        await append(partial, manifest, 0, 1, 2)
        await partial.begin(other)
        assert (partial.count, partial.byte_count) == (1, 2 * CHUNK)
        await partial.append(memoryview(DATA)[2 * CHUNK :])
        await partial.commit()
    assert (tmp_path / "model").read_bytes() == DATA


async def test_a_wrong_chunk_is_not_written(manifest: Manifest, tmp_path: Path) -> None:
    async with open_partial(tmp_path / "model", manifest.sha256, inline) as partial:
        assert partial is not None
        await partial.begin(manifest)
        for wrong in (b"", b"x" * CHUNK, bytes(piece(manifest, 1)), bytes(piece(manifest, 0)[:-1])):
            with pytest.raises(CorruptedError):
                await partial.append(memoryview(wrong))
        assert partial.count == 0


async def test_one_process_takes_a_file_and_another_waits_for_it(
    manifest: Manifest, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    target = tmp_path / "model"
    found: list[PartialFile | None] = []

    async def wait() -> None:
        async with open_partial(target, manifest.sha256, inline) as partial:
            found.append(partial)

    async with (
        trio.open_nursery() as nursery,
        open_partial(target, manifest.sha256, inline) as partial,
    ):
        assert partial is not None
        nursery.start_soon(wait)
        await trio.sleep(5)
        assert not found
        await partial.begin(manifest)
        await append(partial, manifest, *range(manifest.count))
        await partial.commit()
    assert found == [None]


async def test_a_file_that_was_cut_is_no_file_to_lend(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(b"x" * 10)
    into = bytearray(8)
    read_chunk(path, 2, memoryview(into))
    assert into == b"x" * 8
    with pytest.raises(CorruptedError):
        read_chunk(path, 4, memoryview(into))
