"""A simulated disk and the real file system answer every sequence of calls alike, errors included."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import chdir
from typing import Any

from hypothesis import example, given, settings, strategies as st

from trinamo.sim.disk.disk import Disk
from trinamo.sim.disk.process import Descriptors, Process

PATHS = ("a", "b", "d", "d/a", "d/e", "d/e/a", "l", "../x/a", "a/", "d/", ".", "d/..", "n" * 256)
FLAGS = (
    os.O_RDONLY,
    os.O_RDWR,
    os.O_WRONLY | os.O_CREAT,
    os.O_RDWR | os.O_CREAT | os.O_EXCL,
    os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    os.O_RDONLY | os.O_DIRECTORY,
    os.O_RDONLY | os.O_NOFOLLOW,
)
paths = st.sampled_from(PATHS)
slots = st.integers(0, 3)
sizes = st.integers(-1, 9)
pieces = st.binary(max_size=6)
wheres = st.sampled_from((os.SEEK_SET, os.SEEK_CUR, os.SEEK_END))
CALLS: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "open": (paths, st.sampled_from(FLAGS)),
    "mkdir": (paths,),
    "rmdir": (paths,),
    "unlink": (paths,),
    # Linux says of a name that is too long that nothing is there, if that is true of the other.
    "rename": (st.sampled_from(PATHS[:-1]), st.sampled_from(PATHS[:-1])),
    "link": (paths, paths),
    "symlink": (st.sampled_from(("a", "d", "l", "d/e", "nowhere", "../x/d")), paths),
    "readlink": (paths,),
    "listdir": (paths,),
    "truncate": (paths, sizes),
    "stat": (paths,),
    "lstat": (paths,),
    "chdir": (st.sampled_from(("d", "..", "a", ".")),),
    "read": (slots, st.integers(0, 9)),
    "write": (slots, pieces),
    "pread": (slots, sizes, sizes),
    "pwrite": (slots, pieces, sizes),
    "lseek": (slots, st.integers(-9, 9), wheres),
    "ftruncate": (slots, sizes),
    "fsync": (slots,),
    "fstat": (slots,),
    "dup": (slots,),
    "close": (slots,),
}
calls = st.sampled_from(sorted(CALLS)).flatmap(lambda name: st.tuples(st.just(name), *CALLS[name]))


class Player:
    """Plays calls on `api`, with slots in the place of descriptors, and tells what came of each."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._slots: list[int] = []

    def play(self, name: str, *args: Any) -> object:
        takes_slot = name[0] in "rwpfdlc" and isinstance(args[0], int)
        if takes_slot:
            if not self._slots:
                return None
            slot = args[0] % len(self._slots)
            args = (self._slots.pop(slot) if name == "close" else self._slots[slot], *args[1:])
        call: Callable[..., Any] = getattr(self._api, name)
        try:
            answer = call(*args)
        except OSError as error:
            return type(error), error.errno, error.filename, error.filename2
        if name in ("open", "dup"):
            self._slots.append(answer)
            return "opened"
        return plain(answer)

    def seeks_the_end_of_a_folder(self, name: str, *args: Any) -> bool:
        """Where that is, each of Linux's file systems says otherwise."""
        if name != "lseek" or args[2] != os.SEEK_END or not self._slots:
            return False
        return stat.S_ISDIR(self._api.fstat(self._slots[args[0] % len(self._slots)]).st_mode)

    def end(self) -> None:
        for fd in self._slots:
            self._api.close(fd)


def plain(answer: object) -> object:
    """What of an answer is no machine's own."""
    if isinstance(answer, os.stat_result):
        is_file = stat.S_ISREG(answer.st_mode)
        return stat.S_IFMT(answer.st_mode), is_file and (answer.st_size, answer.st_nlink)
    return sorted(answer) if isinstance(answer, list) else answer


def simulated() -> Process:
    disk = Disk(
        "a", below=lambda *_: 0, tell=lambda *_, **__: None, wall=float, stall=lambda _: None
    )
    disk.mount("/sim/x")
    process = Process(disk, Descriptors())
    process.chdir("x")
    return process


@settings(deadline=None)
@given(st.lists(calls, min_size=1, max_size=25))
@example([("open", "d", os.O_CREAT | os.O_WRONLY), ("symlink", "a", "d/")])
@example([("open", "d", os.O_CREAT | os.O_WRONLY), ("link", "d", "d/"), ("mkdir", "d/", 0o777)])
def test_every_sequence_of_calls_is_answered_as_by_the_kernel(played: list[Any]) -> None:
    here = simulated()
    mine = Player(here)
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(f"{folder}/x")
        with chdir(f"{folder}/x"):
            real = Player(os)
            try:
                for name, *args in played:
                    if name == "chdir" and args == [".."] and os.getcwd() == f"{folder}/x":
                        continue
                    if real.seeks_the_end_of_a_folder(name, *args):
                        continue
                    assert mine.play(name, *args) == real.play(name, *args), (name, args)
            finally:
                real.end()
            there = sorted(
                (os.path.relpath(os.path.join(at, each), f"{folder}/x"))
                for at, folders, files in os.walk(f"{folder}/x")
                for each in folders + files
            )
    assert names_of(here) == there


def names_of(process: Process, at: str = "/sim/x", prefix: str = "") -> list[str]:
    found = []
    for name in process.listdir(at):
        found.append(prefix + name)
        if stat.S_ISDIR(process.lstat(f"{at}/{name}").st_mode):
            found += names_of(process, f"{at}/{name}", f"{prefix}{name}/")
    return sorted(found)
