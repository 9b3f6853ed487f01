"""The disk of a simulated host: files that outlive processes, and lose what was not synced.

A write goes to the page cache: a killed process loses nothing, a machine without power loses what
`sync` had not finished. Of bytes appended since then nothing, all, or a torn first part survives;
of a file replaced since then the old or the new content. Which is a decision of the run, and the
dull answer is that all of it is lost.

Faults are fields: a disk may be slow, full, or fail its next syncs. After a failed sync the bytes
count as clean though they never reached the disk, as on Linux: syncing again does not save them.

What this module does not do: directories, permissions, and real files. Code that is to run on a
simulated disk takes it as a parameter. Read next: `world.py`, which cuts the power.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from .world import World

__all__ = ["Disk"]


@attrs.define
class _File:
    content: bytes = b""
    """What processes read: the page cache."""
    durable: bytes | None = None
    """What is on the platter; None if the file's creation has not been synced."""
    is_damaged: bool = False
    """Whether a sync failed: the platter has a hole that no later sync fills."""


class Disk:
    """One machine's files. `write_s` and `sync_s` are how long each operation takes.

    `bytes_max` is its size; `sync_failures` says how many of the next syncs fail with EIO.
    """

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.write_s = 0.0
        self.sync_s = 0.001
        self.bytes_max = 1 << 40
        self.sync_failures = 0
        self._world = world
        self._files: dict[str, _File] = {}

    @property
    def used_bytes(self) -> int:
        """The size of all files together."""
        return sum(len(file.content) for file in self._files.values())

    def paths(self) -> list[str]:
        """All files there are, in the order of their creation."""
        return list(self._files)

    def read(self, path: str) -> bytes:
        """The whole content; `FileNotFoundError` if there is none."""
        return self._file(path).content

    async def append(self, path: str, data: bytes) -> None:
        """Add `data` at the end, making the file if need be. `OSError` ENOSPC if it does not fit.

        What fits of it is written even then, as a real disk does: a torn record.
        """
        await self._take(self.write_s)
        room = max(0, self.bytes_max - self.used_bytes)
        file = self._files.setdefault(path, _File())
        file.content += data[:room]
        self._world.add_row("disk", host=self.name, do="append", path=path, size=len(data))
        if room < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    async def replace(self, path: str, data: bytes) -> None:
        """Put `data` in the place of the whole content at once, as a rename does."""
        await self._take(self.write_s)
        before = len(self._files[path].content) if path in self._files else 0
        if self.used_bytes - before + len(data) > self.bytes_max:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        file = self._files.setdefault(path, _File())
        file.content, file.is_damaged = data, False
        self._world.add_row("disk", host=self.name, do="replace", path=path, size=len(data))

    async def truncate(self, path: str, size: int) -> None:
        """Cut the file to its first `size` bytes."""
        await self._take(self.write_s)
        file = self._file(path)
        file.content = file.content[:size]
        self._world.add_row("disk", host=self.name, do="truncate", path=path, size=size)

    async def sync(self, path: str) -> None:
        """Return once everything written before is safe; `OSError` EIO if the disk fails.

        Cancelled, or overtaken by a power cut, it promises nothing.
        """
        file = self._file(path)
        content = file.content
        await self._take(self.sync_s)
        if self.sync_failures > 0:
            self.sync_failures -= 1
            file.is_damaged = True
            self._world.add_row("disk", host=self.name, do="sync failed", path=path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        if not file.is_damaged:
            file.durable = content
        self._world.add_row("disk", host=self.name, do="sync", path=path, size=len(content))

    def remove(self, path: str) -> None:
        """Forget the file, at once and for good."""
        self._file(path)
        del self._files[path]

    def lose_power(self) -> None:
        """What the power cut leaves; the world calls it."""
        below = self._world.choices.below
        for path, file in list(self._files.items()):
            durable = file.durable
            before = durable or b""
            if file.content == durable:
                continue
            tail = len(file.content) - len(before)
            if file.is_damaged:
                file.content = before
            elif tail > 0 and file.content.startswith(before):
                fate = below(3, "unsynced tail")
                kept = (0, tail, 1 + below(tail - 1, "torn at") if fate == 2 else 0)[fate]
                file.content = file.content[: len(before) + kept]
            elif not below(2, "unsynced content"):
                file.content = before
            if durable is None and not file.content:
                self._files.pop(path)
            file.durable, file.is_damaged = file.content, False
            self._world.add_row(
                "disk", host=self.name, do="lost", path=path, left=len(file.content)
            )

    def corrupt(self, path: str) -> None:
        """Flip one bit of the file, on the platter too; which one is a decision of the run."""
        file = self._file(path)
        if file.content:
            position = self._world.choices.below(len(file.content), "corrupt")
            flipped = bytearray(file.content)
            flipped[position] ^= 1
            file.content = file.durable = bytes(flipped)
            self._world.add_row("disk", host=self.name, do="corrupt", path=path, at=position)

    def _file(self, path: str) -> _File:
        if path not in self._files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self._files[path]

    @staticmethod
    async def _take(seconds: float) -> None:
        await trio.sleep(seconds)
