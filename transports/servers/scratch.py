"""Temporary directories that are deleted even if their owner is killed: by the next one.

A server's data is large (etcd preallocates 64 MB), and an owner that dies by SIGKILL deletes
nothing. So each directory is held by a file lock, which the kernel lets go when its owner dies;
whoever makes a directory first deletes those of the same kind that nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LOCK_NAME: Final = "lock"
# A directory younger than this may belong to someone who is about to lock it.
ABANDONED_AFTER_S: Final = 60.0
# Leaves room for the directory's own name and a socket in it.
PARENT_BYTES_MAX: Final = 70


def scratch_parent() -> Path:
    """Where these directories are made: the system's folder for temporary files, or `/tmp`.

    The path of a socket is at most 107 bytes long, and stands in lists of addresses.
    """
    place = Path(tempfile.gettempdir())
    is_fit = len(os.fsencode(place)) <= PARENT_BYTES_MAX and not set(", ") & set(str(place))
    return place if is_fit else Path("/tmp")  # noqa: S108 -- only for a directory of ours in it


@contextmanager
def scratch_directory(prefix: str, *, parent: Path | None = None) -> Iterator[Path]:
    """A new directory, for this user alone, whose name starts with `prefix`; deleted at exit."""
    place = scratch_parent() if parent is None else parent
    _sweep(place, prefix)
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    try:
        with (directory / LOCK_NAME).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _sweep(place: Path, prefix: str) -> None:
    """Delete what dead owners left. What cannot be read or deleted is someone else's."""
    for lock_path in place.glob(f"{prefix}*/{LOCK_NAME}"):
        try:
            if time.time() - os.stat(lock_path).st_mtime < ABANDONED_AFTER_S:  # noqa: TID251, PTH116 -- compared with a file's time
                continue
            with lock_path.open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_path.parent, ignore_errors=True)
        except OSError:
            continue
