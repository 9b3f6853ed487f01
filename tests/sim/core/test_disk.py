from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable

import pytest
import trio

from trinamo.sim import Disk, ReplayChoices, World


def _run(main: Callable[[World, Disk], Awaitable[None]], values: tuple[int, ...] = ()) -> World:
    world = World(ReplayChoices(values), policy="fifo")

    async def drive() -> None:
        await main(world, world.disk("a"))

    world.run(drive)
    return world


async def _write_a_log(disk: Disk) -> None:
    await disk.append("log", b"one\n")
    await disk.sync("log")
    await disk.append("log", b"two\n")


def test_a_killed_process_loses_nothing_it_wrote() -> None:
    async def main(world: World, disk: Disk) -> None:
        await world.boot("a", _write_a_log, disk).ended.wait()
        world.boot("a", trio.sleep_forever)
        world.kill("a")
        assert disk.read("log") == b"one\ntwo\n"

    _run(main)


@pytest.mark.parametrize(
    ("values", "left"),
    [((), b"one\n"), ((1,), b"one\ntwo\n"), ((2, 0), b"one\nt"), ((2, 1), b"one\ntw")],
)
def test_a_power_cut_loses_the_unsynced_tail_or_tears_it(
    values: tuple[int, ...], left: bytes
) -> None:
    async def main(world: World, disk: Disk) -> None:
        await world.boot("a", _write_a_log, disk).ended.wait()
        world.power_off("a")
        assert disk.read("log") == left

    _run(main, values)


@pytest.mark.parametrize(("values", "left"), [((), b"old"), ((1,), b"new")])
def test_a_power_cut_leaves_the_old_or_the_new_content_of_a_replaced_file(
    values: tuple[int, ...], left: bytes
) -> None:
    async def main(world: World, disk: Disk) -> None:
        await disk.append("state", b"old")
        await disk.sync("state")
        await disk.replace("state", b"new")
        world.power_off("a")
        assert disk.read("state") == left

    _run(main, values)


def test_a_file_that_was_never_synced_is_gone_after_a_power_cut() -> None:
    async def main(world: World, disk: Disk) -> None:
        await disk.append("new", b"x")
        world.power_off("a")
        with pytest.raises(FileNotFoundError):
            disk.read("new")

    _run(main)


def test_a_full_disk_takes_what_fits_and_says_so() -> None:
    async def main(world: World, disk: Disk) -> None:
        disk.bytes_max = 6
        await disk.append("log", b"1234")
        with pytest.raises(OSError, match="space") as caught:
            await disk.append("log", b"5678")
        assert caught.value.errno == errno.ENOSPC
        assert disk.read("log") == b"123456"
        with pytest.raises(OSError, match="space"):
            await disk.replace("log", b"1234567")
        await disk.truncate("log", 2)
        assert disk.used_bytes == 2

    _run(main)


def test_a_failed_sync_promises_nothing_and_the_next_one_does_not_help() -> None:
    async def main(world: World, disk: Disk) -> None:
        await disk.append("log", b"x")
        disk.sync_failures = 1
        with pytest.raises(OSError, match="error") as caught:
            await disk.sync("log")
        assert caught.value.errno == errno.EIO
        await disk.sync("log")
        assert disk.read("log") == b"x"
        world.power_off("a")
        assert disk.paths() == []

    _run(main)


def test_a_slow_disk_takes_virtual_time() -> None:
    async def main(world: World, disk: Disk) -> None:
        disk.write_s, disk.sync_s = 2.0, 3.0
        await disk.append("log", b"x")
        await disk.sync("log")
        assert trio.current_time() == 5.0

    _run(main)


def test_what_is_written_while_a_sync_runs_is_not_covered_by_it() -> None:
    async def main(world: World, disk: Disk) -> None:
        disk.sync_s = 1.0
        await disk.append("log", b"a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(disk.sync, "log")
            await trio.sleep(0.5)
            await disk.append("log", b"b")
        world.power_off("a")
        assert disk.read("log") == b"a"

    _run(main)


def test_a_host_may_come_back_without_its_disk() -> None:
    async def main(world: World, disk: Disk) -> None:
        await world.boot("a", _write_a_log, disk).ended.wait()
        await world.boot("a", trio.sleep, 0).ended.wait()
        assert world.disk("a").paths() == ["log"]
        await world.boot("a", trio.sleep, 0, keep_disk=False).ended.wait()
        assert world.disk("a").paths() == []

    _run(main)


def test_a_bit_flips() -> None:
    async def main(world: World, disk: Disk) -> None:
        await disk.append("log", b"aaa")
        disk.corrupt("log")
        assert disk.read("log") == b"a`a"
        disk.remove("log")
        assert disk.paths() == []

    _run(main, (1,))
