"""The calls that reach a host's disk: `open`, the functions of `os`, and what `tempfile` asks.

During a run they go to the disk of the running task's host if the path is on it, and a descriptor goes
to whose it is. Everything else is the real call: a host may read real files (modules, package data,
certificates). That it writes none, and opens no file of its disk behind Python's back, is seen to by
`outside`, which the guard asks of every real call (`isolation/guard.py`).

What this module does not do: the calls themselves (`process.py`).
"""

from __future__ import annotations

import _pyio  # type: ignore[import-not-found]
import builtins
import errno
import glob
import io
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, Final

from .disk import ROOT, TMP, failed
from .process import FIRST_FD, Descriptors, Process

PATH_CALLS: Final = (
    *("open", "stat", "lstat", "access", "listdir", "scandir", "readlink", "chdir", "statvfs"),
    *("mkdir", "rmdir", "unlink", "remove", "truncate", "chmod", "chown", "lchown", "utime"),
    *("listxattr", "mkfifo", "mknod"),
)
PAIR_CALLS: Final = ("rename", "replace", "link", "symlink")
DESCRIPTOR_CALLS: Final = (
    *("read", "write", "pread", "pwrite", "readv", "writev", "lseek", "ftruncate", "close", "dup"),
    *("fsync", "fdatasync", "fstat", "fstatvfs", "fchmod", "fchown", "fchdir", "isatty"),
    *("get_inheritable", "set_inheritable", "posix_fallocate", "posix_fadvise"),
)
WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGING: Final = frozenset(
    f"os.{name}"
    for name in (
        *("remove", "rename", "mkdir", "rmdir", "link", "symlink", "truncate", "chmod", "chown"),
        *("utime", "chdir", "setxattr", "removexattr"),
    )
)
"""The audit events of calls that change real files, or where the real process stands."""
BY_NUMBER: Final = {"mmap.__new__": "mmap", "fcntl.flock": "flock", "fcntl.lockf": "lockf"}
"""The audit events of calls in C that take a descriptor, each with what people call it."""
FILE_EVENTS: Final = CHANGING | BY_NUMBER.keys() | {"open", "sqlite3.connect"}
"""The audit events that `Calls.outside` has a word for."""
ADVICE: Final = (
    f"; a host writes to its own disk: give it a path below {ROOT}, a relative one, or a folder that"
    " host.disk.mount(path) put there"
)
BEHIND: Final = (
    ", in C, past the simulated disk: give the code a stand-in for it in runs (a sqlite3 database may"
    " be ':memory:')"
)
NAME_CHARACTERS: Final = "abcdefghijklmnopqrstuvwxyz0123456789_"

SUPPORTED: Final = (
    os.supports_dir_fd,
    os.supports_fd,
    os.supports_follow_symlinks,
    os.supports_effective_ids,
)

Current = Callable[[], Process | None]
"""The process that the running task is of; None for scenario code."""


class Calls:
    """The stand-ins of one run. `dice` gives `tempfile` its names."""

    def __init__(self, current: Current, descriptors: Descriptors, dice: random.Random) -> None:
        self._current, self._descriptors, self._dice = current, descriptors, dice

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, what `stand_ins` put in place comes here."""
        global _active
        _active = self
        try:
            yield
        finally:
            _active = None

    def by_path(self, name: str, real: Any, path: Any = ".", *args: Any, **named: Any) -> Any:
        process = self._current()
        if process is None or not process.has(path, named.get("dir_fd")):
            return real(path, *args, **named)
        return getattr(process, name)(path, *args, **named)

    def by_pair(self, name: str, real: Any, src: Any, dst: Any, *args: Any, **named: Any) -> Any:
        process = self._current()
        targets = [(dst, named.get("dst_dir_fd", named.get("dir_fd")))]
        if name != "symlink":
            targets.append((src, named.get("src_dir_fd")))
        if process is None or not any(process.has(*target) for target in targets):
            return real(src, dst, *args, **named)
        return getattr(process, name)(src, dst, *args, **named)

    def by_descriptor(self, name: str, real: Any, fd: Any, *args: Any, **named: Any) -> Any:
        if not isinstance(fd, int) or fd < FIRST_FD:
            return real(fd, *args, **named)
        process = self._descriptors.owners.get(fd)
        if process is None:
            raise failed(errno.EBADF)
        return getattr(process, name)(fd, *args, **named)

    def sendfile(self, real: Any, out_fd: int, in_fd: int, *args: Any, **named: Any) -> Any:
        owner = self._descriptors.owners.get(out_fd) or self._descriptors.owners.get(in_fd)
        send = real if owner is None else owner.sendfile
        return send(out_fd, in_fd, *args, **named)

    def getcwd(self, real: Any) -> str:
        process = self._current()
        return str(real()) if process is None else process.getcwd()

    def getpid(self, real: Any) -> int:
        process = self._current()
        return int(real()) if process is None else process.number

    def getcwdb(self, _real: Any) -> bytes:
        return os.fsencode(os.getcwd())  # noqa: PTH109 -- of whoever asks

    def sync(self, real: Any) -> None:
        process = self._current()
        real() if process is None else process.sync()

    def gettempdir(self, real: Any) -> str:
        return str(real()) if self._current() is None else TMP

    def gettempdirb(self, _real: Any) -> bytes:
        return os.fsencode(tempfile.gettempdir())

    def names(self, real: Any) -> Iterator[str]:
        if self._current() is None:
            yield from real()
        while True:
            yield "".join(self._dice.choices(NAME_CHARACTERS, k=8))

    def open(
        self,
        real: Any,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,  # noqa: FBT001, FBT002 -- as `open`
        opener: Callable[[Any, int], int] | None = None,
    ) -> Any:
        process = self._current()
        is_ours = file >= FIRST_FD if isinstance(file, int) else process and process.has(file)
        if not is_ours:
            return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
        is_binary = "b" in mode
        if is_binary and "t" in mode:
            raise ValueError("can't have text and binary mode at once")
        if is_binary and (encoding or errors or newline) is not None:
            raise ValueError("binary mode takes no encoding, errors or newline")
        if not is_binary and buffering == 0:
            raise ValueError("can't have unbuffered text I/O")
        raw = RawFile(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        is_both, is_writing = "+" in mode, "r" not in mode
        wrap: Any = io.BufferedWriter if is_writing else io.BufferedReader
        buffer = (io.BufferedRandom if is_both else wrap)(raw, buffering if buffering > 1 else 8192)
        if is_binary:
            return buffer
        text = io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)
        vars(text)["mode"] = mode
        return text

    def outside(self, event: str, args: tuple[Any, ...]) -> str | None:
        """What a real call of a host did with files that it may not, in words; None if it may."""
        process = self._current()
        if process is None:
            return None
        first = args[0] if args else None
        path = os.fsdecode(first) if isinstance(first, (str, bytes)) else ""
        # Modules are imported by whoever needs them first.
        if "__pycache__" in path or path.startswith("/dev/"):
            return None
        if event == "open" and isinstance(args[2], int) and args[2] & WRITING and path:
            return f"a real file was written: {path}{ADVICE}"
        if event == "open" and process.disk.has(path):
            return f"a file of its disk was opened without Python's `open`: {path}{BEHIND}"
        if event == "sqlite3.connect" and path not in ("", ":memory:"):
            return f"sqlite3.connect({path!r}){BEHIND}"
        if event in BY_NUMBER and isinstance(first, int) and first >= FIRST_FD:
            return f"{BY_NUMBER[event]} of a file of its disk{BEHIND}"
        if event in CHANGING:
            return f"{event} of a real file: {args!r:.100}{ADVICE}"
        return None


_active: Calls | None = None
"""The calls of the run; None outside runs, when what still holds a stand-in reaches the real call."""


def _stand_in(owner: Any, name: str, how: Callable[..., Any], *first: Any) -> Any:
    real = getattr(owner, name)

    @wraps(real)
    def call(*args: Any, **named: Any) -> Any:
        if _active is None:
            return real(*args, **named)
        return how(_active, *first, real, *args, **named)

    for supported in SUPPORTED:
        # `shutil` and others ask whether these have the function that they are about to call.
        if real in supported:
            supported.add(call)
    return call


@cache
def stand_ins() -> list[tuple[Any, str, Any]]:
    """Whose attribute, which, and by what it is replaced in every run."""
    made: list[tuple[Any, ...]] = [
        *((os, name, Calls.by_path, name) for name in PATH_CALLS),
        *((os, name, Calls.by_pair, name) for name in PAIR_CALLS),
        *((os, name, Calls.by_descriptor, name) for name in DESCRIPTOR_CALLS),
        (os, "sendfile", Calls.sendfile),
        (os, "getcwd", Calls.getcwd),
        (os, "getcwdb", Calls.getcwdb),
        (os, "getpid", Calls.getpid),
        (os, "sync", Calls.sync),
        (tempfile, "gettempdir", Calls.gettempdir),
        (tempfile, "gettempdirb", Calls.gettempdirb),
        (tempfile, "_get_candidate_names", Calls.names),
        (io, "open", Calls.open),
    ]
    found = [
        (owner, name, _stand_in(owner, name, how, *first)) for owner, name, how, *first in made
    ]
    found.append((builtins, "open", found[-1][2]))
    unlink = next(stand_in for owner, name, stand_in in found if name == "unlink")
    # From Python 3.13 on `pathlib` globs by a class that keeps its functions.
    globber = getattr(glob, "_StringGlobber", None)
    found += [
        (globber, name, staticmethod(stand_in))
        for owner, name, stand_in in found
        if owner is os and name in ("lstat", "scandir") and hasattr(globber, name)
    ]
    closer: Any = getattr(tempfile, "_TemporaryFileCloser")  # noqa: B009 -- no type knows it
    for call in vars(closer).values():
        # It deletes its file by a function that it keeps as a default.
        defaults = getattr(call, "__defaults__", None) or ()
        if os.unlink in defaults:
            changed = tuple(unlink if each is os.unlink else each for each in defaults)
            found.append((call, "__defaults__", changed))
    return found


class RawFile(_pyio.FileIO):  # type: ignore[misc]
    """An unbuffered file, on the descriptors of `os`."""

    def __del__(self) -> None:
        # Without the warning of an unclosed file: a process that was killed closes none.
        if self._fd >= 0 and self._closefd and not self.closed:
            os.close(self._fd)
