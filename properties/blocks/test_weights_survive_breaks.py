"""Whatever breaks while a model file is taken, it appears whole and right or not at all."""

from __future__ import annotations

import hashlib
import random
import tempfile
from pathlib import Path

import attrs
import trio
import trio.testing
from hypothesis import given, settings, strategies as st

from tests.runtime.weights.lending import CHUNK, World, open_world
from trinamo.runtime.errors import TrinamoError
from trinamo.transports.memory.transfer import TransferFaults

CHUNKS = 6
DATA = random.Random(7).randbytes(CHUNK * (CHUNKS - 1) + 321)


@attrs.frozen
class Life:
    """One process that takes the file: what its transfers suffer, and when it is killed."""

    faults: TransferFaults
    killed_after_s: float


@attrs.frozen
class Case:
    lives: list[Life]
    dies_after: list[int]
    """By holder, how many items it says before it is killed."""
    damaged: list[int]
    """Chunks that the disk of a further holder has lost; none: there is no such holder."""


@st.composite
def lives(draw: st.DrawFn) -> Life:
    where = st.none() | st.integers(0, 1)
    faults = TransferFaults(
        is_unreachable=draw(st.sampled_from([False, False, False, True])),
        breaks_after=draw(where),
        stalls_after=draw(where),
        corrupts=draw(where),
        lands_late=draw(st.booleans()),
        block_s=draw(st.sampled_from([0.0, 0.3, 2.0])),
    )
    return Life(faults, draw(st.floats(0, 60)))


cases = st.builds(
    Case,
    lives=st.lists(lives(), max_size=4),
    dies_after=st.lists(st.integers(0, CHUNKS + 1), max_size=3),
    damaged=st.lists(st.integers(0, CHUNKS - 1), max_size=2),
)


@settings(max_examples=30, deadline=None)
@given(case=cases)
def test_a_file_is_whole_or_absent_and_no_chunk_that_was_right_is_taken_twice(case: Case) -> None:
    """At no time is there a target that is not the file; bytes counted as taken are its size."""
    with tempfile.TemporaryDirectory() as folder:
        trio.run(run, case, Path(folder), clock=trio.testing.MockClock(autojump_threshold=0))


async def run(case: Case, folder: Path) -> None:
    target, sha256 = folder / "model", hashlib.sha256(DATA).hexdigest()
    async with open_world(patience_s=30, stall_timeout_s=5) as world:
        await add_holders(world, case, folder)
        for life in case.lives:
            with trio.move_on_after(life.killed_after_s):
                try:
                    await world.take(target, sha256, life.faults)
                except TrinamoError:
                    assert read(target) is None
            assert read(target) in (None, DATA)
        # A holder that is well comes at last, and a process that nothing happens to.
        await world.add(folder / "good")
        await world.take(target, sha256)
        assert read(target) == DATA
        assert world.taken_bytes == len(DATA)
        assert sorted(each for each in names(folder) if each.startswith((".", "model"))) == [
            "model"
        ]
        for holder in world.holders.values():
            assert not holder.lender.describe()["lent"]


async def add_holders(world: World, case: Case, folder: Path) -> None:
    good, damaged = folder / "good", folder / "damaged"
    good.write_bytes(DATA)
    for count in case.dies_after:
        (await world.add(good)).items_left = count
    if case.damaged:
        data = bytearray(DATA)
        for chunk in set(case.damaged):
            data[chunk * CHUNK] ^= 1
        damaged.write_bytes(data)
        await world.add(damaged, as_of=good)


def read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def names(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir()]
