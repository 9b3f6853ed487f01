"""A disk that is full, slow, or fails to sync; and a power cut, by the decisions that it asks."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from trinamo.sim import (
    Choices,
    Disk,
    LabelledChoices,
    Network,
    SeedChoices,
    World,
    arm,
    heal_core,
)

CUT = "power cut on a: "


def written(path: str, *pieces: bytes, syncs: bool = False) -> None:
    with open(path, "ab", buffering=0) as file:
        for piece in pieces:
            file.write(piece)
        if syncs:
            os.fsync(file.fileno())


def sync_folder(path: str = "/sim") -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def after_the_cut(play: Callable[[], object], answers: dict[str, list[int]] | None = None) -> Disk:
    """The disk when `play` ran and the power failed, with these answers to its decisions."""
    world = World(LabelledChoices(answers or {}))

    async def process() -> None:
        play()
        await trio.sleep(60)

    async def main() -> None:
        world.boot("a", process)
        await trio.sleep(1)
        world.power_off("a")

    world.run(main)
    return world.host("a").disk


def test_what_was_synced_with_its_name_survives_whatever_is_decided() -> None:
    def play() -> None:
        written("x", b"one", b"two", syncs=True)
        sync_folder()

    assert after_the_cut(play).read_bytes("x") == b"onetwo"


@pytest.mark.parametrize(
    ("answers", "left"),
    [
        ({}, b"oldonetwo"),
        ({f"{CUT}/sim/x": [1]}, b"old"),
        ({f"{CUT}/sim/x": [2]}, b"oldonetw"),
        ({f"{CUT}/sim/x": [2], f"{CUT}/sim/x, torn write from the end": [1]}, b"oldon"),
        ({f"{CUT}/sim/x": [3]}, b"old\0\0\0two"),
    ],
    ids=["kept", "lost", "torn", "torn earlier", "a page missing"],
)
def test_what_was_not_synced_is_decided(answers: dict[str, list[int]], left: bytes) -> None:
    def play() -> None:
        written("x", b"old", syncs=True)
        sync_folder()
        written("x", b"one", b"two")

    assert after_the_cut(play, answers).read_bytes("x") == left


def test_a_file_without_its_folder_synced_may_have_no_name() -> None:
    def play() -> None:
        written("x", b"one", syncs=True)

    with pytest.raises(FileNotFoundError):
        after_the_cut(play, {f"{CUT}create /sim/x, lost": [1]}).read_bytes("x")


def test_a_rename_is_whole_or_not_there() -> None:
    def play() -> None:
        written("x", b"old", syncs=True)
        sync_folder()
        written("y", b"new", syncs=True)
        os.replace("y", "x")

    assert after_the_cut(play).read_bytes("x") == b"new"
    lost = after_the_cut(play, {f"{CUT}rename /sim/y to /sim/x, lost": [1]})
    assert (lost.read_bytes("x"), lost.read_bytes("y")) == (b"old", b"new")


def test_a_file_that_was_rewritten_may_be_empty() -> None:
    """The state that surprises everybody: cut to nothing, and the new content not there yet."""

    def play() -> None:
        written("x", b"old", syncs=True)
        sync_folder()
        Path("x").write_bytes(b"new")

    torn = f"{CUT}/sim/x"
    assert after_the_cut(play, {torn: [2], f"{torn}, bytes missing": [2]}).read_bytes("x") == b""


def on_a(play: Callable[[World], Awaitable[Any]], choices: Choices | None = None) -> World:
    world = World(choices or SeedChoices(1))

    async def main() -> None:
        await world.boot("a", play, world).ended.wait()

    world.run(main)
    return world


def test_a_full_disk_takes_what_fits_and_then_nothing() -> None:
    async def play(world: World) -> None:
        disk = world.host("a").disk
        fd = os.open("x", os.O_CREAT | os.O_RDWR)
        disk.fill(5)
        assert os.write(fd, b"12345678") == 5
        with pytest.raises(OSError, match="No space left") as caught:
            os.write(fd, b"6")
        assert caught.value.errno == errno.ENOSPC
        assert os.pwrite(fd, b"abc", 1) == 3
        os.unlink("x")
        written("y", b"no room")
        os.close(fd)
        written("z", b"5 new")
        disk.make_room()
        written("y", b", and now there is")

    async def tolerant(world: World) -> None:
        with pytest.raises(OSError, match="No space left"):
            await play(world)

    world = on_a(tolerant)
    assert world.host("a").disk.read_bytes("y") == b""


def test_a_failed_sync_fails_once_and_its_writes_never_get_there() -> None:
    async def play(world: World) -> None:
        world.host("a").disk.fail_fsync()
        with open("x", "wb", buffering=0) as file:
            file.write(b"one")
            with pytest.raises(OSError, match="Input/output error"):
                os.fsync(file.fileno())
            file.write(b"two")
            os.fsync(file.fileno())
        assert Path("x").read_bytes() == b"onetwo"

    assert on_a(play).host("a").disk.durable_bytes("x") == b"\0\0\0two"


def test_a_slow_sync_stops_the_whole_process_and_no_other() -> None:
    world = World(LabelledChoices({"slow disk of a": [15]}))
    seen: list[tuple[str, float]] = []

    async def ticking(name: str) -> None:
        for _ in range(3):
            await trio.sleep(0.5)
            seen.append((name, trio.current_time()))

    async def slow() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ticking, "a")
            written("x", b"x", syncs=True)
            await trio.lowlevel.checkpoint()
            seen.append(("synced", trio.current_time()))

    async def main() -> None:
        world.host("a").disk.slow_down(3.0)
        world.boot("b", ticking, "b")
        await world.boot("a", slow).ended.wait()

    world.run(main)
    assert [when for who, when in seen if who == "b"] == [0.5, 1.0, 1.5]
    assert ("synced", 3.0) in seen
    assert [when for who, when in seen if who == "a"] == [3.5, 4.0, 4.5]


def test_a_slow_sync_in_a_thread_delays_its_caller_alone() -> None:
    world = World(LabelledChoices({"slow disk of a": [15]}))
    seen: list[float] = []

    async def ticking() -> None:
        for _ in range(3):
            await trio.sleep(0.5)
            seen.append(trio.current_time())

    async def slow() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ticking)
            fd = os.open("x", os.O_CREAT | os.O_WRONLY)
            await trio.to_thread.run_sync(os.fsync, fd)
            assert 3.0 <= trio.current_time() < 4.0

    async def main() -> None:
        world.host("a").disk.slow_down(3.0)
        await world.boot("a", slow).ended.wait()

    world.run(main)
    assert seen == [0.5, 1.0, 1.5]


def test_plans_have_faults_of_disks_and_healing_undoes_them() -> None:
    world = World(SeedChoices(1))
    network = Network(world)
    failed: list[str] = []

    async def logging() -> None:
        while True:
            try:
                written("log", b"x", syncs=True)
            except OSError as error:
                failed.append(errno.errorcode[error.errno or 0])
            await trio.sleep(0.1)

    async def main() -> None:
        world.boot("a", logging)
        arm(
            world,
            network,
            [
                {"do": "fill", "host": "a", "at_s": 0.45, "for_s": 0.2},
                {"do": "fail_fsync", "host": "a", "at_s": 0.85},
                {"do": "slow_down", "host": "a", "at_s": 1.0},
                {"do": "fill", "host": "a", "at_s": 5.0},
            ],
        )
        await trio.sleep(10)
        heal_core(world, network, ["a"], lambda name: world.boot(name, logging))
        count = len(failed)
        await trio.sleep(1)
        assert len(failed) == count

    world.run(main)
    assert failed[:3] == ["ENOSPC", "ENOSPC", "EIO"]
    assert set(failed[3:]) == {"ENOSPC"}
    assert {"fill", "fail_fsync", "slow_down"} <= set(world.struck)
