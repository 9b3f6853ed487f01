"""One host's disk: its tree of names, its faults, and what a power cut leaves of it.

Processes see every change at once. A change of names (a file made, renamed, linked or removed, a folder
made or removed) is durable once a folder that it touches was synced; until then a power cut decides
whether it came to the platter, each change by itself and as a whole: of a rename there is never half.
What is in a file is decided apart from its name (`inodes.py`), as POSIX promises no order between them.

What this module does not do: descriptors and errors of calls (`process.py`), the calls themselves
(`calls.py`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, Protocol
from zlib import crc32

from .inodes import WAITING_MAX, Below, File, Folder, Inode, Symlink, Write

ROOT: Final = "/sim"
"""The folder in which a host's process starts: paths below it, and relative ones, are on its disk."""
TMP: Final = f"{ROOT}/tmp"  # noqa: S108 -- on a simulated disk
"""Where `tempfile` makes its files on a host."""
SIZE_BYTES: Final = 1 << 30
LINKS_MAX: Final = 40
NAME_BYTES_MAX: Final = 255
SLOW_STEPS: Final = 16


class Spot(NamedTuple):
    """Where a path leads: the folder, the name in it, and what stands there, if anything."""

    folder: Folder
    name: str
    inode: Inode | None


class Change(NamedTuple):
    """Names that change together: which, in words, and what each stands for afterwards."""

    what: str
    entries: tuple[tuple[Folder, str, Inode | None], ...]

    def reach_platter(self) -> None:
        for folder, name, inode in self.entries:
            if inode is None:
                folder.durable.pop(name, None)
            else:
                folder.durable[name] = inode


class Tell(Protocol):
    """Adds a row to the run's trace."""

    def __call__(self, kind: str, /, **fields: Any) -> None: ...


def failed(code: int, path: object = None, other: object = None) -> OSError:
    """The `OSError` that a call on `path` (and `other`) raises."""
    text = os.strerror(code)
    return (
        OSError(code, text, path, None, other) if other is not None else OSError(code, text, path)
    )


class Disk:
    """What survives of a host from boot to boot, and how it fails.

    `below` decides, `tell` adds rows, `wall` is the running host's clock in Unix seconds, and
    `stall` stops the host's processes for some seconds.
    """

    def __init__(
        self,
        host: str,
        *,
        below: Below,
        tell: Tell,
        wall: Callable[[], float],
        stall: Callable[[float], None],
    ) -> None:
        self.host = host
        self.below, self.tell, self.wall, self.stall = below, tell, wall, stall
        self.places = [ROOT]
        """The folders that are on this disk; see `mount`."""
        self.used_bytes = 0
        self.size_bytes = SIZE_BYTES
        self._inodes = 0
        self._failing_syncs = 0
        self._slow_s = 0.0
        self._waiting: list[Change] = []
        self.top = Folder(self._number(), "/", 0o755, 0.0)
        self.mount(ROOT)
        self.mount(TMP)

    def __repr__(self) -> str:
        return f"<Disk of {self.host}>"

    # --- for scenarios -----------------------------------------------------------------------

    def mount(self, path: str) -> None:
        """Have the absolute `path` on this disk, too: an empty folder, which no power cut removes."""
        if not path.startswith("/"):
            raise ValueError(f"a disk is mounted at an absolute path, not at {path!r}")
        self._durable_folder(path)
        if not self.has(path):
            self.places.append(path)

    def _durable_folder(self, path: str) -> Folder:
        folder = self.top
        for part in path.strip("/").split("/"):
            child = folder.entries.get(part)
            if child is None:
                above = folder.path.rstrip("/")
                child = Folder(self._number(), f"{above}/{part}", 0o755, 0.0, folder)
                child.links = 1
                folder.entries[part] = folder.durable[part] = child
            if not isinstance(child, Folder):
                raise failed(errno.ENOTDIR, path)
            folder = child
        return folder

    def has(self, path: str) -> bool:
        """Whether this absolute path is on the disk."""
        return any(path == place or path.startswith(f"{place}/") for place in self.places)

    def read_bytes(self, path: str) -> bytes:
        """What a process would read in the file; relative paths begin at `/sim`."""
        return bytes(self._file(path).data)

    def durable_bytes(self, path: str) -> bytes:
        """What the worst power cut now leaves of the file's content, if its name is there then."""
        return bytes(self._file(path).durable)

    def write_bytes(self, path: str, data: bytes) -> None:
        """Put a file there, with the folders it needs, as if it had been on the platter for long."""
        path = self._absolute(path)
        if not self.has(path):
            raise ValueError(f"{path} is not on the disk of {self.host}: mount its folder first")
        above, _, name = path.rpartition("/")
        folder = self._durable_folder(above)
        file = folder.entries.get(name)
        if file is None:
            file = File(self._number(), path, 0o644, self.wall())
            file.links = 1
        if not isinstance(file, File):
            raise failed(errno.EISDIR, path)
        folder.entries[name] = folder.durable[name] = file
        self.used_bytes += len(data) - len(file.data)
        file.waiting.clear()
        file.data, file.durable = bytearray(data), bytearray(data)

    def _absolute(self, path: str) -> str:
        return path if path.startswith("/") else f"{ROOT}/{path}"

    def _file(self, path: str) -> File:
        inode = self.find(self._absolute(path), self.top).inode
        if inode is None:
            raise failed(errno.ENOENT, path)
        if not isinstance(inode, File):
            raise failed(errno.EISDIR, path)
        return inode

    # --- faults ------------------------------------------------------------------------------

    def fill(self, free_bytes: int = 0) -> None:
        """Leave room for so many bytes; a write takes what fits, and then raises ENOSPC."""
        self.tell("fill", host=self.host, free_bytes=free_bytes)
        self.size_bytes = self.used_bytes + free_bytes

    def make_room(self) -> None:
        """Undo `fill`."""
        self.tell("make_room", host=self.host)
        self.size_bytes = SIZE_BYTES

    def fail_fsync(self, times: int = 1) -> None:
        """Have the next syncs of files raise EIO.

        What they should have carried over never gets there, though processes go on reading it, and
        the next sync succeeds: as on Linux, which takes the pages for clean then.
        """
        self.tell("fail_fsync", host=self.host, times=times)
        self._failing_syncs = times

    def slow_down(self, delay_s: float) -> None:
        """Have each sync take up to `delay_s`; 0 undoes it.

        The process stands still meanwhile, as one whose only thread is in the kernel; a sync in a
        thread of trio's delays that thread alone.
        """
        self.tell("slow_down", host=self.host, delay_s=delay_s)
        self._slow_s = delay_s

    def heal(self) -> None:
        """Undo all of these."""
        if self.size_bytes != SIZE_BYTES:
            self.make_room()
        if self._slow_s:
            self.slow_down(0.0)
        self._failing_syncs = 0

    # --- what the kernel does ----------------------------------------------------------------

    def find(self, path: str, start: Folder, *, follow: bool = True) -> Spot:
        """Where `path` leads from `start`; a symbolic link at its end is followed if `follow`."""
        if not path:
            raise failed(errno.ENOENT, path)
        left = path.split("/")[::-1]
        first = self.top if path.startswith("/") else start
        spot = Spot(first.parent, ".", first)
        links = 0
        while left:
            part, folder = left.pop(), spot.inode
            if folder is None and not any((part, *left)):
                break  # A slash behind what is not there yet.
            if not isinstance(folder, Folder):
                raise failed(errno.ENOENT if folder is None else errno.ENOTDIR, path)
            spot = _inside(folder, part, spot.name)
            if isinstance(spot.inode, Symlink) and (left or follow):
                links += 1
                if links > LINKS_MAX:
                    raise failed(errno.ELOOP, path)
                target = spot.inode.target
                left += target.split("/")[::-1]
                spot = Spot(folder, ".", self.top if target.startswith("/") else folder)
        return spot

    def make(self, kind: type[File | Folder], spot: Spot, permissions: int, path: str) -> Inode:
        """A new empty file or folder at `spot`."""
        more = (spot.folder,) if kind is Folder else ()
        made = kind(self._number(), path, permissions, self.wall(), *more)
        self.change("create", path, (spot.folder, spot.name, made))
        return made

    def make_link(self, spot: Spot, target: str, path: str) -> None:
        """A symbolic link at `spot`."""
        made = Symlink(self._number(), path, 0o777, self.wall(), target)
        self.change("symlink", path, (spot.folder, spot.name, made))

    def unnamed(self, path: str, permissions: int) -> File:
        """A file that no name leads to."""
        return File(self._number(), path, permissions, self.wall())

    def change(self, what: str, path: str, *entries: tuple[Folder, str, Inode | None]) -> None:
        """Have these names stand for something else, all at once; None takes a name away."""
        now_s = self.wall()
        for folder, name, inode in entries:
            before = folder.entries.pop(name, None)
            if before is not None:
                before.links -= 1
                self.release(before)
            if inode is not None:
                inode.links += 1
                inode.changed_s = now_s
                folder.entries[name] = inode
                if isinstance(inode, Folder):
                    inode.parent = folder
            folder.written_s = now_s
        self.tell("disk", what=what, path=path)
        self._waiting.append(Change(f"{what} {path}", entries))
        if len(self._waiting) > WAITING_MAX:
            self._waiting.pop(0).reach_platter()

    def release(self, inode: Inode) -> None:
        """Free its bytes if neither a name nor a descriptor leads to it any more."""
        if isinstance(inode, File) and not inode.links and not inode.opened:
            self.used_bytes -= len(inode.data)

    def write(self, file: File, at: int, data: bytes) -> int:
        """Write what there is room for; how many bytes that is. Raises ENOSPC if it is none."""
        room = self.size_bytes - self.used_bytes + max(0, len(file.data) - at)
        if data and room < 1:
            raise failed(errno.ENOSPC)
        taken = data[: max(0, room)]
        self._buffer(file, Write(at, taken))
        return len(taken)

    def resize(self, file: File, size: int) -> None:
        """Cut the file, or lengthen it with zeros."""
        if size - len(file.data) > self.size_bytes - self.used_bytes:
            raise failed(errno.ENOSPC)
        self._buffer(file, Write(size, None))

    def _buffer(self, file: File, write: Write) -> None:
        before = len(file.data)
        file.write(write)
        self.used_bytes += len(file.data) - before
        file.written_s = file.changed_s = self.wall()
        size, check = (-1, 0) if write.data is None else (len(write.data), crc32(write.data))
        self.tell("disk", what="write", path=file.path, at=write.at, size=size, check=check)

    def sync(self, inode: Inode) -> None:
        """Carry a file's content, or the changes of a folder's names, to the platter."""
        if isinstance(inode, Folder):
            self._sync_names(inode)
        elif isinstance(inode, File) and self._failing_syncs:
            self._failing_syncs -= 1
            inode.waiting.clear()
            self.tell("disk", what="fsync fails", path=inode.path)
            raise failed(errno.EIO)
        elif isinstance(inode, File):
            inode.sync()
        self.tell("disk", what="fsync", path=inode.path)
        if self._slow_s:
            step = self.below(SLOW_STEPS, f"slow disk of {self.host}")
            self.stall(self._slow_s * step / (SLOW_STEPS - 1))

    def _sync_names(self, folder: Folder) -> None:
        """Those of `folder`; a rename from another one brings the earlier changes of that one along."""
        folders, chosen = {id(folder)}, []
        for change in reversed(self._waiting):
            touched = {id(entry[0]) for entry in change.entries}
            if touched & folders:
                folders |= touched
                chosen.append(change)
        for change in reversed(chosen):
            self._waiting.remove(change)
            change.reach_platter()

    def sync_all(self) -> None:
        """What `os.sync` does: carry everything over."""
        for change in self._waiting:
            change.reach_platter()
        self._waiting.clear()
        for _, inode in self._reachable():
            if isinstance(inode, File):
                inode.sync()
        self.tell("disk", what="sync", path=ROOT)

    def lose_power(self) -> None:
        """Decide what of all that waits reached the platter; from now on that is what is there."""
        for change in self._waiting:
            if not self.below(2, f"power cut on {self.host}: {change.what}, lost"):
                change.reach_platter()
            else:
                self.tell("disk", what="lost", path=change.what)
        self._waiting.clear()
        self.used_bytes = 0
        found = list(self._reachable())
        for path, inode in found:
            inode.links = inode.opened = 0
            if isinstance(inode, File):
                fate = inode.lose_power(self.below, f"power cut on {self.host}: {path}")
                if fate != "kept":
                    self.tell("disk", what=fate, path=path)
                self.used_bytes += len(inode.data)
        for _, inode in found:
            if isinstance(inode, Folder):
                inode.entries = dict(inode.durable)
                for child in inode.entries.values():
                    child.links += 1
                    if isinstance(child, Folder):
                        child.parent = inode

    def _reachable(self) -> Iterator[tuple[str, Inode]]:
        """Everything that is named on the platter, by path, each once."""
        seen: set[int] = set()
        left: list[tuple[str, Inode]] = [("", self.top)]
        while left:
            path, inode = left.pop()
            if id(inode) in seen:
                continue
            seen.add(id(inode))
            yield path, inode
            if isinstance(inode, Folder):
                names = sorted(inode.durable, reverse=True)
                left += [(f"{path}/{name}", inode.durable[name]) for name in names]

    def _number(self) -> int:
        self._inodes += 1
        return self._inodes


def _inside(folder: Folder, part: str, name: str) -> Spot:
    """Where one part of a path leads from `folder`, which was reached by `name`."""
    if part in ("", "."):
        return Spot(folder.parent, part or name, folder)
    if part == "..":
        return Spot(folder.parent.parent, "..", folder.parent)
    if len(os.fsencode(part)) > NAME_BYTES_MAX:
        raise failed(errno.ENAMETOOLONG)
    return Spot(folder, part, folder.entries.get(part))
