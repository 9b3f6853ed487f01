"""What `os.scandir` answers of a simulated folder.

What this module does not do: know what is in the folder (`process.py`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, Self


class DirEntry(os.PathLike[Any]):
    """What `os.scandir` yields."""

    def __init__(
        self, stat_of: Callable[..., os.stat_result], where: Any, prefix: Any, name: Any
    ) -> None:
        self.name = name
        self.path = os.path.join(prefix, name) if prefix else name  # noqa: PTH118 -- as `os.scandir`
        reached: dict[str, Any] = {"dir_fd": where} if isinstance(where, int) else {}
        at = name if isinstance(where, int) else self.path
        self.stat = partial(stat_of, at, **reached)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def _is(self, kind: int, follow: bool) -> bool:  # noqa: FBT001 -- the type and one flag
        try:
            return stat.S_IFMT(self.stat(follow_symlinks=follow).st_mode) == kind
        except FileNotFoundError:
            return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_IFDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_IFREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_IFLNK, follow=False)

    def is_junction(self) -> Literal[False]:
        return False

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino


class Scan(Iterator[DirEntry]):
    """The iterator that `os.scandir` answers."""

    def __init__(self, entries: list[DirEntry]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> DirEntry:
        return next(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it early."""
        self._entries = iter(())
