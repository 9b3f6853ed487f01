"""Code of a simulated host uses files as it would anywhere, and they are its host's."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio

from tests.sources import ROOT
from trinamo.sim import Escape, SeedChoices, World


def on_a_host(play: Callable[[], Any], seed: int = 1, *, boots: int = 1) -> tuple[World, list[Any]]:
    """The world after `play` has run on a host of it, and what it answered at each boot."""
    world, answers = World(SeedChoices(seed)), []

    async def process() -> None:
        answer = play()
        answers.append(await answer if hasattr(answer, "__await__") else answer)

    async def main() -> None:
        for _ in range(boots):
            await world.boot("a", process).ended.wait()

    world.run(main)
    return world, answers


def test_open_reads_back_what_it_wrote_and_nothing_of_it_is_real(tmp_path: Path) -> None:
    def play() -> Any:
        with open("notes.txt", "w", encoding="utf-8") as file:
            file.write("one\ntwo\n")
        with open("/sim/notes.txt", "a+b") as file:
            file.write(b"three")
            file.seek(0)
            return file.readlines()

    world, answers = on_a_host(play)
    assert answers == [[b"one\n", b"two\n", b"three"]]
    assert world.host("a").disk.read_bytes("notes.txt") == b"one\ntwo\nthree"
    assert not Path("notes.txt").exists()
    assert not Path("/sim").exists()


EARLY = """
from os import O_CREAT, O_WRONLY, close, fsync, open as open_fd, rename, write

def save(data):
    fd = open_fd("new", O_WRONLY | O_CREAT)
    write(fd, data)
    fsync(fd)
    close(fd)
    rename("new", "kept")
"""


def test_names_that_were_bound_before_the_run_reach_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A power cut keeps what was synced by a function that the module had bound when it was imported."""
    module = types.ModuleType("early_os")
    exec(EARLY, vars(module))
    monkeypatch.setitem(sys.modules, "early_os", module)
    real = module.fsync

    world, _ = on_a_host(lambda: module.save(b"data"))

    assert world.host("a").disk.read_bytes("kept") == b"data"
    assert module.fsync is real is os.fsync


def test_a_disk_outlives_the_process_and_each_host_has_its_own() -> None:
    def play() -> Any:
        path = Path("/sim/count")
        path.write_text(str(1 + int(path.read_text() if path.exists() else "0")))
        return path.read_text()

    world, answers = on_a_host(play, boots=3)
    assert answers == ["1", "2", "3"]
    with pytest.raises(FileNotFoundError):
        world.host("b").disk.read_bytes("count")


def test_pathlib_shutil_and_tempfile_work_as_they_are() -> None:
    def play() -> Any:
        Path("a/b").mkdir(parents=True)
        Path("a/b/c.json").write_text(json.dumps({"x": 1}))
        Path("a/link").symlink_to("b/c.json")
        shutil.copytree("a", "copy", symlinks=True)
        shutil.move("copy/b", "moved")
        shutil.rmtree("copy")
        with tempfile.NamedTemporaryFile("w") as named, tempfile.TemporaryDirectory() as folder:
            Path(folder, "x").write_bytes(b"x")
            assert Path(named.name).parent == Path(folder).parent == Path("/sim/tmp")
        with tempfile.TemporaryFile() as unnamed:
            unnamed.write(b"y")
        assert not Path("/sim/tmp/x").exists()
        assert os.listdir("/sim/tmp") == []
        assert Path("a/link").resolve() == Path("/sim/a/b/c.json")
        assert json.loads(Path("a/link").read_text()) == {"x": 1}
        return sorted(str(path) for path in Path().rglob("*"))

    assert on_a_host(play)[1] == [
        ["a", "a/b", "a/b/c.json", "a/link", "moved", "moved/c.json", "tmp"]
    ]


def test_asynchronous_files_of_trio_and_anyio_work_as_they_are() -> None:
    async def play() -> Any:
        async with await trio.open_file("x", "w") as file:
            await file.write("hello")
        async with await anyio.open_file("x") as again:
            read = await again.read()
        await trio.Path("d").mkdir()
        found = [str(path) async for path in anyio.Path("/sim").iterdir()]
        return read, await trio.Path("x").read_text(), sorted(found)

    assert on_a_host(play)[1] == [("hello", "hello", ["/sim/d", "/sim/tmp", "/sim/x"])]


def test_times_and_numbers_of_files_are_the_runs_own() -> None:
    def play() -> Any:
        Path("x").write_text("x")
        found = os.stat("x")
        with os.scandir() as entries:
            names = sorted((entry.name, entry.is_dir(), entry.inode()) for entry in entries)
        return found.st_mtime, found.st_ino, found.st_dev, found.st_mtime_ns, names

    assert on_a_host(play)[1] == on_a_host(play)[1]
    assert on_a_host(play)[1][0][0] == 1_700_000_000.0


@pytest.mark.parametrize(
    "play",
    [
        lambda: Path(f"{ROOT}/real.txt").write_text("x"),
        lambda: os.open(f"{ROOT}/real.txt", os.O_CREAT | os.O_RDWR),
        (ROOT / "real").mkdir,
        lambda: (ROOT / "pyproject.toml").rename(ROOT / "real"),
        lambda: io.FileIO(f"{ROOT}/real.txt", "w"),
    ],
    ids=["open", "os.open", "mkdir", "rename", "FileIO"],
)
def test_writing_a_real_file_is_an_escape_that_says_what_to_do(play: Callable[[], Any]) -> None:
    with pytest.raises(Escape, match="give it a path below /sim"):
        on_a_host(play)
    assert not (ROOT / "real.txt").exists()
    assert (ROOT / "pyproject.toml").exists()


def test_a_database_in_c_is_an_escape_and_one_in_memory_is_not() -> None:
    def play() -> Any:
        with closing(sqlite3.connect(":memory:")) as database:
            return database.execute("select 1").fetchone()

    assert on_a_host(play)[1] == [(1,)]
    with pytest.raises(Escape, match=r"sqlite3.connect\('data.db'\), in C"):
        on_a_host(lambda: sqlite3.connect("data.db"))


@pytest.mark.parametrize("name", ["flock", "lockf"])
def test_a_lock_of_a_file_is_an_escape_that_names_it(name: str) -> None:
    def play() -> None:
        with Path("data.lock").open("w") as file, suppress(OSError):
            getattr(fcntl, name)(file, fcntl.LOCK_EX)

    with pytest.raises(Escape, match=f"{name} of a file of its disk, in C"):
        on_a_host(play)


def test_real_files_can_be_read_and_modules_imported() -> None:
    def play() -> Any:
        return (ROOT / "pyproject.toml").read_text()[:14], Path("/etc").is_dir()

    assert on_a_host(play)[1] == [("[build-system]", True)]


def test_a_mounted_folder_is_on_the_disk_though_it_is_not_below_its_root() -> None:
    world = World(SeedChoices(1))
    world.host("a").disk.mount("/var/lib/thing")
    world.host("a").disk.write_bytes("/var/lib/thing/config", b"on")

    async def process() -> None:
        assert Path("/var/lib/thing/config").read_bytes() == b"on"
        Path("/var/lib/thing/state").write_text("1")

    async def main() -> None:
        await world.boot("a", process).ended.wait()

    world.run(main)
    assert world.host("a").disk.read_bytes("/var/lib/thing/state") == b"1"


def test_scenario_code_has_real_files(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "x").write_text("x")

    World(SeedChoices(1)).run(main)
    assert (tmp_path / "x").read_text() == "x"


def test_a_killed_process_leaves_what_it_wrote_and_nothing_that_it_only_meant_to_write() -> None:
    world = World(SeedChoices(1))

    async def process() -> None:
        with open("log", "w") as file:
            file.write("written")
            file.flush()
            file.write("in Python's buffer")
            try:
                await trio.sleep(60)
            finally:
                Path("log").write_text("cleaned up")

    async def main() -> None:
        world.boot("a", process)
        await trio.sleep(1)
        world.kill("a")
        assert world.host("a").disk.read_bytes("log") == b"written"

    world.run(main)
    assert world.host("a").disk.read_bytes("log") == b"written"


def test_errors_are_those_of_the_real_file_system() -> None:
    def play() -> Any:
        Path("f").write_text("x")
        codes = []
        for call in (
            lambda: open("nowhere/x"),
            lambda: open("f/x"),
            lambda: open("."),
            lambda: os.mkdir("f"),
            lambda: os.read(2_999_999, 1),
        ):
            try:
                call()
            except OSError as error:
                codes.append(error.errno)
        return codes

    expected = [errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EBADF]
    assert on_a_host(play)[1] == [expected]


REPLAY = """
import os, pathlib, tempfile, sys
from trinamo.sim import SeedChoices, World
world = World(SeedChoices(3))
async def process():
    for name in {"b", "a", "c"}:
        pathlib.Path(name).write_text(name * 9)
    with tempfile.NamedTemporaryFile() as file:
        file.write(os.listdir()[0].encode())
        world.note("seen", names=tuple(os.listdir()), at=os.stat(file.name).st_ino, name=file.name)
async def main():
    await world.boot("a", process).ended.wait()
    world.power_off("a")
    world.boot("a", process)
    await world.host("a").ended.wait()
names = sorted({"b", "a", "c"})
print(world.run(main))
"""


def test_runs_with_files_are_the_same_in_every_process(tmp_path: Path) -> None:
    code = REPLAY.replace('{"b", "a", "c"}:', 'sorted({"b", "a", "c"}):')
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": str(seed), "TMPDIR": str(tmp_path)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in range(3)
    }
    assert len(digests) == 1
