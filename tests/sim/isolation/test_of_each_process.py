"""What belongs to a process or a machine: the run's own, whatever machine plays it."""

from __future__ import annotations

import bz2
import os
import socket
import sys
import tarfile
import time
import timeit
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path

import pytest
import trio

from trinamo.sim import Network, SeedChoices, World, search

# Looked up when called, and in local time: the guard replaces what answers.
# ruff: noqa: DTZ005


def play(main: Callable[[], Awaitable[object]], *hosts: str) -> World:
    world = World(SeedChoices(1))
    Network(world)

    async def boot() -> None:
        for name in hosts:
            await world.boot(name, main).ended.wait()

    world.run(boot)
    return world


def test_each_life_of_a_host_has_a_process_number_that_is_nobody_s_here() -> None:
    seen = []

    async def tell() -> None:
        seen.append(os.getpid())

    play(tell, "a", "b", "a")
    assert len({*seen}) == 3
    assert min(seen) >= 1 << 22
    before, seen[:] = list(seen), []
    play(tell, "a", "b", "a")
    assert seen == before
    assert os.getpid() < 1 << 22


def test_a_machine_is_called_as_its_host_and_found_in_any_case() -> None:
    seen = []

    async def tell() -> None:
        seen.append((socket.gethostname(), socket.gethostbyname("node_a")))

    play(tell, "Node_A")
    assert seen == [("Node_A", "10.0.0.1")]


def test_local_time_is_utc_wherever_the_machine_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    seen = []

    async def tell() -> None:
        seen.append((datetime.now().hour, time.localtime().tm_hour, time.strftime("%H")))

    play(tell, "a")
    assert seen == [(22, 22, "22")]
    assert time.localtime(0).tm_hour == 9
    monkeypatch.undo()
    time.tzset()


def test_who_exits_with_0_has_returned_and_who_exits_otherwise_fails_the_run() -> None:
    async def leaves(world: World, code: int = 0) -> None:
        async def main() -> None:
            sys.exit(code)

        await world.boot("a", main).ended.wait()
        world.note("ended")
        world.choices.below(2, "what may differ")

    async def fails(world: World) -> None:
        await leaves(world, 3)

    assert search(leaves, seeds=range(2), jobs=1) is None
    found = search(fails, seeds=range(2), jobs=1, shrink=False)
    assert found is not None
    assert found.rule == "error SystemExit"


def test_modules_of_python_that_keep_open_or_a_clock_for_themselves_have_the_run_s() -> None:
    seen: list[object] = []

    async def use() -> None:
        Path("in.txt").write_text("on the disk")  # noqa: ASYNC240 -- on a simulated disk
        with tarfile.open("out.tar", "w") as archive:
            archive.add("in.txt")
        with bz2.open("out.bz2", "wt") as packed:
            packed.write("packed")
        with tarfile.open("out.tar") as archive:
            found = archive.extractfile("in.txt")
            assert found is not None
            seen.extend((found.read(), timeit.default_timer()))
        with pytest.raises(PermissionError):
            os.mkfifo("pipe")

    world = play(use, "a")
    assert seen == [b"on the disk", trio.testing.MockClock().current_time()]
    assert world.host("a").disk.read_bytes("out.bz2")
    assert vars(tarfile)["bltn_open"] is open
    assert timeit.default_timer is time.perf_counter
