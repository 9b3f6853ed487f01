"""What one process does with its host's disk: each method is the function of `os` of the same name.

Arguments, answers and errors are those of Linux, for a process of root. Time stamps are the host's
virtual wall clock, inode numbers count the disk's own, and folders are listed in an order that is
decided: sorted, or backwards.

What this module does not do: know which calls come from which process (`calls.py`).
"""

from __future__ import annotations

import errno
import os
import stat
from itertools import count
from typing import Any, Final

import attrs

from .disk import ROOT, Disk, Spot, failed
from .inodes import File, Folder, Inode, Symlink
from .listing import DirEntry, Scan

FIRST_FD: Final = 2_000_000
"""Descriptors of simulated files are numbered from here, and no number is used twice in a run."""
FIRST_PID: Final = 1 << 22
"""Linux has no process with such a number, so a signal meets nobody's."""
DEVICE: Final = 7
ACCESS: Final = os.O_RDONLY | os.O_WRONLY | os.O_RDWR

Path = Any
"""A `str`, `bytes` or `PathLike`, or the descriptor of a folder or file."""


@attrs.define(eq=False)
class Description:
    """One open file: what it is, how it was opened, and where the next read or write begins."""

    inode: Inode
    flags: int
    path: str
    at: int = 0


class Descriptors:
    """All open files of a run: whose each number is."""

    def __init__(self) -> None:
        self._numbers = count(FIRST_FD)
        self.processes = count(FIRST_PID)
        self.owners: dict[int, Process] = {}

    def take(self, owner: Process) -> int:
        """A number that was never used."""
        number = next(self._numbers)
        self.owners[number] = owner
        return number


class Process:
    """One life of a host, as its disk sees it: open files, a current folder."""

    def __init__(self, disk: Disk, descriptors: Descriptors) -> None:
        self.disk = disk
        self._all = descriptors
        self.number = next(descriptors.processes)
        """What `os.getpid` answers."""
        self._open: dict[int, Description] = {}
        self._folder = ROOT
        self._is_over = False

    def has(self, path: Path, dir_fd: int | None = None) -> bool:
        """Whether `path` is on the disk: below one of its places, or relative."""
        if isinstance(path, int):
            return path >= FIRST_FD
        text = os.fsdecode(path)
        if not text.startswith("/"):
            return dir_fd is None or dir_fd >= FIRST_FD
        return self.disk.has(os.path.normpath(text))

    def end(self) -> None:
        """As a process that was killed: its descriptors are closed, and nothing it does now counts."""
        for number in list(self._open):
            self.close(number)
        self._is_over = True

    # --- paths -------------------------------------------------------------------------------

    def _find(self, path: Path, dir_fd: int | None = None, *, follow: bool = True) -> Spot:
        if self._is_over:
            raise failed(errno.EIO, path)
        inode: Inode | None
        if isinstance(path, int):
            inode = self._described(path).inode
            return Spot(inode.parent if isinstance(inode, Folder) else self.disk.top, ".", inode)
        text, start = os.fsdecode(path), self.disk.top
        if dir_fd is not None:
            inode = self._described(dir_fd).inode
            if not isinstance(inode, Folder):
                raise failed(errno.ENOTDIR, path)
            start = inode
        elif not text.startswith("/"):
            inode = self.disk.find(self._folder, start).inode
            if not isinstance(inode, Folder) or not text:
                raise failed(errno.ENOENT, path)
            start = inode
        try:
            return self.disk.find(text, start, follow=follow)
        except OSError as error:
            error.filename = path
            raise

    def _existing(self, path: Path, dir_fd: int | None = None, *, follow: bool = True) -> Inode:
        inode = self._find(path, dir_fd, follow=follow).inode
        if inode is None:
            raise failed(errno.ENOENT, path)
        return inode

    def _last(self, path: Path, dir_fd: int | None) -> Spot:
        """The place that is itself to be filled or emptied: slashes behind a link's name do not lead beyond it."""
        try:
            return self._find(os.fsdecode(path).rstrip("/") or path, dir_fd, follow=False)
        except OSError as error:
            raise failed(error.errno or errno.EIO, path) from None

    def _free(self, path: Path, dir_fd: int | None, *, is_folder: bool = False) -> Spot:
        """A place for something new. That something is there comes before that it is no folder."""
        spot = self._last(path, dir_fd)
        if spot.inode is not None:
            raise failed(errno.EEXIST, path)
        if _is_slashed(path) and not is_folder:
            raise failed(errno.ENOENT, path)
        return spot

    def _full(self, path: Path, dir_fd: int | None = None) -> str:
        """`path` as rows and labels have it."""
        start = self._folder if dir_fd is None else self._described(dir_fd).path
        return os.path.normpath(os.path.join(start, os.fsdecode(path)))  # noqa: PTH118 -- virtual

    # --- names -------------------------------------------------------------------------------

    def open(self, path: Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        is_new = flags & (os.O_CREAT | os.O_EXCL) == os.O_CREAT | os.O_EXCL
        if flags & os.O_CREAT and _is_slashed(path):
            self._last(path, dir_fd)
            raise failed(errno.EISDIR, path)
        spot = self._find(path, dir_fd, follow=not (is_new or flags & os.O_NOFOLLOW))
        inode, full = spot.inode, self._full(path, dir_fd)
        if isinstance(inode, Folder) and flags & os.O_TMPFILE == os.O_TMPFILE:
            inode = self.disk.unnamed(f"{full}/(unnamed)", mode & 0o7755)
        if refusal := _refusal(inode, flags):
            raise failed(refusal, path)
        if inode is None:
            inode = self.disk.make(File, spot, mode & 0o7755, full)
        if isinstance(inode, File) and flags & os.O_TRUNC and inode.data:
            self.disk.resize(inode, 0)
        return self._opened(Description(inode, flags, full))

    def _opened(self, description: Description) -> int:
        number = self._all.take(self)
        self._open[number] = description
        description.inode.opened += 1
        return number

    def mkdir(self, path: Path, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        spot = self._free(path, dir_fd, is_folder=True)
        self.disk.make(Folder, spot, mode & 0o7755, self._full(path, dir_fd))

    def rmdir(self, path: Path, *, dir_fd: int | None = None) -> None:
        spot = self._last(path, dir_fd)
        if spot.inode is None:
            raise failed(errno.ENOENT, path)
        if not isinstance(spot.inode, Folder):
            raise failed(errno.ENOTDIR, path)
        if spot.name == ".":
            raise failed(errno.EINVAL, path)
        if spot.inode.entries:
            raise failed(errno.ENOTEMPTY, path)
        if spot.inode.path in self.disk.places:
            raise failed(errno.EBUSY, path)
        self.disk.change("rmdir", self._full(path, dir_fd), (spot.folder, spot.name, None))

    def unlink(self, path: Path, *, dir_fd: int | None = None) -> None:
        spot = self._last(path, dir_fd)
        if spot.inode is None:
            raise failed(errno.ENOENT, path)
        if isinstance(spot.inode, Folder):
            raise failed(errno.EISDIR, path)
        if _is_slashed(path):
            raise failed(errno.ENOTDIR, path)
        self.disk.change("unlink", self._full(path, dir_fd), (spot.folder, spot.name, None))

    remove = unlink

    def rename(
        self,
        src: Path,
        dst: Path,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
    ) -> None:
        if not (self.has(src, src_dir_fd) and self.has(dst, dst_dir_fd)):
            raise failed(errno.EXDEV, src, dst)
        try:
            source, target = self._last(src, src_dir_fd), self._last(dst, dst_dir_fd)
            is_slashed = _is_slashed(src) or _is_slashed(dst)
            if not _may_replace(source, target, is_slashed=is_slashed):
                return
        except OSError as error:
            raise failed(error.errno or errno.EIO, src, dst) from None
        what = f"rename {self._full(src, src_dir_fd)} to"
        before, after = (source.folder, source.name, None), (*target[:2], source.inode)
        self.disk.change(what, self._full(dst, dst_dir_fd), before, after)

    replace = rename

    def link(
        self,
        src: Path,
        dst: Path,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        **_: bool,
    ) -> None:
        if not (self.has(src, src_dir_fd) and self.has(dst, dst_dir_fd)):
            raise failed(errno.EXDEV, src, dst)
        try:
            # Python's default asks link(2) itself, which follows no link at the end.
            inode = self._existing(src, src_dir_fd, follow=False)
            spot = self._free(dst, dst_dir_fd)
            if isinstance(inode, Folder):
                raise failed(errno.EPERM)
        except OSError as error:
            raise failed(error.errno or errno.EIO, src, dst) from None
        self.disk.change(
            f"link {self._full(src, src_dir_fd)} as",
            self._full(dst, dst_dir_fd),
            (*spot[:2], inode),
        )

    def symlink(
        self,
        src: Path,
        dst: Path,
        target_is_directory: bool = False,  # noqa: ARG002, FBT001, FBT002 -- as `os`
        *,
        dir_fd: int | None = None,
    ) -> None:
        try:
            spot = self._free(dst, dir_fd)
        except OSError as error:
            raise failed(error.errno or errno.EIO, src, dst) from None
        self.disk.make_link(spot, os.fsdecode(src), self._full(dst, dir_fd))

    def readlink(self, path: Path, *, dir_fd: int | None = None) -> Any:
        inode = self._existing(path, dir_fd, follow=False)
        if not isinstance(inode, Symlink):
            raise failed(errno.EINVAL, path)
        return os.fsencode(inode.target) if isinstance(path, bytes) else inode.target

    def listdir(self, path: Path = ".") -> list[Any]:
        folder = self._existing("." if path is None else path)
        if not isinstance(folder, Folder):
            raise failed(errno.ENOTDIR, path)
        names = sorted(folder.entries)
        if len(names) > 1 and self.disk.below(2, f"listing of {folder.path} backwards"):
            names.reverse()
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else list(names)

    def scandir(self, path: Path = ".") -> Scan:
        where = "." if path is None else path
        prefix = "" if isinstance(where, int) else os.fspath(where)
        return Scan([DirEntry(self.stat, where, prefix, name) for name in self.listdir(where)])

    def chdir(self, path: Path) -> None:
        if not isinstance(self._existing(path), Folder):
            raise failed(errno.ENOTDIR, path)
        self._folder = self._described(path).path if isinstance(path, int) else self._full(path)

    fchdir = chdir

    def getcwd(self) -> str:
        return self._folder

    # --- what is known of a file --------------------------------------------------------------

    def stat(
        self, path: Path, *, dir_fd: int | None = None, follow_symlinks: bool = True
    ) -> os.stat_result:
        inode = self._existing(path, dir_fd, follow=follow_symlinks)
        mode = inode.kind | inode.permissions
        links = inode.links
        if isinstance(inode, Folder):
            links += 1 + sum(isinstance(each, Folder) for each in inode.entries.values())
        times = (inode.read_s, inode.written_s, inode.changed_s)
        plain = (mode, inode.number, DEVICE, links, os.getuid(), os.getgid(), inode.size)
        names = ("atime", "mtime", "ctime")
        more: dict[str, Any] = {f"st_{n}": t for n, t in zip(names, times, strict=True)}
        more |= {f"st_{n}_ns": int(t * 1e9) for n, t in zip(names, times, strict=True)}
        more |= {"st_blksize": 4096, "st_blocks": -(-inode.size // 512), "st_rdev": 0}
        return os.stat_result((*plain, *map(int, times)), more)

    def lstat(self, path: Path, *, dir_fd: int | None = None) -> os.stat_result:
        return self.stat(path, dir_fd=dir_fd, follow_symlinks=False)

    fstat = stat

    def access(
        self,
        path: Path,
        mode: int,
        *,
        dir_fd: int | None = None,
        follow_symlinks: bool = True,
        **_: bool,
    ) -> bool:
        try:
            inode = self._existing(path, dir_fd, follow=follow_symlinks)
        except OSError:
            return False
        return not mode & os.X_OK or isinstance(inode, Folder) or bool(inode.permissions & 0o111)

    def chmod(
        self,
        path: Path,
        mode: int,
        *,
        dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        inode = self._existing(path, dir_fd, follow=follow_symlinks)
        inode.permissions, inode.changed_s = stat.S_IMODE(mode), self.disk.wall()

    fchmod = chmod

    def chown(self, path: Path, *_who: int, dir_fd: int | None = None, **_: bool) -> None:
        self._existing(path, dir_fd)

    fchown = lchown = chown

    def mkfifo(self, path: Path, *_: int, **_named: int | None) -> None:
        raise failed(errno.EPERM, path)

    mknod = mkfifo

    def utime(
        self,
        path: Path,
        times: tuple[float, float] | None = None,
        *,
        ns: tuple[int, int] | None = None,
        dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        inode = self._existing(path, dir_fd, follow=follow_symlinks)
        now_s = self.disk.wall()
        given = times if ns is None else (ns[0] / 1e9, ns[1] / 1e9)
        inode.read_s, inode.written_s = given or (now_s, now_s)

    def statvfs(self, path: Path) -> os.statvfs_result:
        self._existing(path)
        size, block = self.disk.size_bytes, 4096
        free = max(0, size - self.disk.used_bytes) // block
        return os.statvfs_result(
            (block, block, size // block, free, free, 1 << 20, 1 << 20, 1 << 20, 0, 255)
        )

    fstatvfs = statvfs

    def listxattr(self, path: Path = None, **_: bool) -> list[str]:
        self._existing("." if path is None else path)
        return []

    # --- descriptors -------------------------------------------------------------------------

    def _described(self, fd: int) -> Description:
        description = self._open.get(fd)
        if description is None:
            raise failed(errno.EBADF)
        return description

    def _file(self, fd: int, *, writes: bool = False) -> tuple[Description, File]:
        description = self._described(fd)
        how = description.flags & ACCESS
        if how == (os.O_RDONLY if writes else os.O_WRONLY):
            raise failed(errno.EBADF)
        if not isinstance(description.inode, File):
            raise failed(errno.EISDIR)
        return description, description.inode

    def close(self, fd: int) -> None:
        inode = self._described(fd).inode
        del self._open[fd], self._all.owners[fd]
        inode.opened -= 1
        self.disk.release(inode)

    def dup(self, fd: int) -> int:
        return self._opened(self._described(fd))

    def isatty(self, fd: int) -> bool:
        self._described(fd)
        return False

    get_inheritable = isatty

    def set_inheritable(self, fd: int, *_: int) -> None:
        self._described(fd)

    posix_fadvise = set_inheritable

    def pread(self, fd: int, n: int, offset: int) -> bytes:
        if n < 0 or offset < 0:
            raise failed(errno.EINVAL)
        _, file = self._file(fd)
        return bytes(file.data[offset : offset + n])

    def read(self, fd: int, n: int) -> bytes:
        description, _ = self._file(fd)
        data = self.pread(fd, n, description.at)
        description.at += len(data)
        return data

    def readv(self, fd: int, buffers: Any) -> int:
        total = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            data = self.read(fd, len(view))
            view[: len(data)] = data
            total += len(data)
        return total

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        if offset < 0:
            raise failed(errno.EINVAL)
        description, file = self._file(fd, writes=True)
        # Linux appends whatever the offset says.
        at = len(file.data) if description.flags & os.O_APPEND else offset
        taken = self.disk.write(file, at, bytes(data)) if memoryview(data) else 0
        if taken and description.flags & os.O_DSYNC:
            self.disk.sync(file)
        return taken

    def write(self, fd: int, data: Any) -> int:
        description, file = self._file(fd, writes=True)
        if description.flags & os.O_APPEND:
            description.at = len(file.data)
        taken = self.pwrite(fd, data, description.at)
        description.at += taken
        return taken

    def writev(self, fd: int, buffers: Any) -> int:
        return self.write(fd, b"".join(bytes(buffer) for buffer in buffers))

    def sendfile(self, out_fd: int, in_fd: int, offset: int | None, count: int) -> int:
        # To or from a real file too: the functions of `os` go to whose descriptor it is.
        data = os.read(in_fd, count) if offset is None else os.pread(in_fd, count, offset)
        return os.write(out_fd, data)

    def lseek(self, fd: int, position: int, whence: int) -> int:
        description = self._described(fd)
        size = description.inode.size if isinstance(description.inode, File) else 0
        start = {os.SEEK_SET: 0, os.SEEK_CUR: description.at, os.SEEK_END: size}.get(whence)
        if start is None or start + position < 0:
            raise failed(errno.EINVAL)
        description.at = start + position
        return description.at

    def ftruncate(self, fd: int, length: int) -> None:
        description = self._described(fd)
        is_writing = description.flags & ACCESS != os.O_RDONLY
        if not (is_writing and isinstance(description.inode, File)) or length < 0:
            raise failed(errno.EINVAL)
        self.disk.resize(description.inode, length)

    def truncate(self, path: Path, length: int) -> None:
        if isinstance(path, int):
            self.ftruncate(path, length)
            return
        if length < 0:
            raise failed(errno.EINVAL, path)
        inode = self._existing(path)
        if not isinstance(inode, File):
            raise failed(errno.EISDIR, path)
        self.disk.resize(inode, length)

    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        _, file = self._file(fd, writes=True)
        if offset + length > len(file.data):
            self.disk.resize(file, offset + length)

    def fsync(self, fd: int) -> None:
        self.disk.sync(self._described(fd).inode)

    fdatasync = fsync

    def sync(self) -> None:
        self.disk.sync_all()


def _is_slashed(path: Path) -> bool:
    return not isinstance(path, int) and os.fsdecode(path).endswith("/")


def _refusal(inode: Inode | None, flags: int) -> int:
    """The error of opening what is there, or is not, with these flags; 0 for none."""
    if inode is None:
        return 0 if flags & os.O_CREAT else errno.ENOENT
    if flags & os.O_CREAT and flags & os.O_EXCL:
        return errno.EEXIST
    if isinstance(inode, Symlink):
        return errno.ELOOP
    if isinstance(inode, Folder):
        return errno.EISDIR if flags & (ACCESS | os.O_CREAT) else 0
    is_folder_wanted = flags & os.O_DIRECTORY and flags & os.O_TMPFILE != os.O_TMPFILE
    return errno.ENOTDIR if is_folder_wanted else 0


def _may_replace(source: Spot, target: Spot, *, is_slashed: bool) -> bool:
    """Whether a rename has anything to do; raises what forbids it."""
    moved, there = source.inode, target.inode
    if {source.name, target.name} & {".", ".."}:
        raise failed(errno.EBUSY)
    if moved is None:
        raise failed(errno.ENOENT)
    if isinstance(moved, Folder):
        if _is_within(target.folder, moved):
            raise failed(errno.EINVAL)
        if there is not None and not isinstance(there, Folder):
            raise failed(errno.ENOTDIR)
    elif is_slashed:
        raise failed(errno.ENOTDIR)
    elif isinstance(there, Folder):
        raise failed(errno.EISDIR)
    if moved is there:
        return False
    if isinstance(there, Folder) and there.entries:
        raise failed(errno.ENOTEMPTY)
    return True


def _is_within(folder: Folder, outer: Folder) -> bool:
    while folder is not folder.parent:
        if folder is outer:
            return True
        folder = folder.parent
    return False
