"""Files, folders and symbolic links: each as processes see it, and as it is on the platter.

A write lands in the kernel's buffer, which every process of the host reads back. `File.sync` carries
the buffer to the platter; until then what is there after a power cut is decided, by labelled choices:
all of it, nothing, a part up to some byte, or all but one page. A kernel writes back when it likes, so
what has waited longest is carried over once more than `WAITING_MAX` writes wait.

What this module does not do: names and who may use them (`disk.py`).
"""

from __future__ import annotations

import stat
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

PAGE_BYTES: Final = 4096
WAITING_MAX: Final = 64
"""How many writes of one file, and changes of names of one disk, wait for the platter at most."""
Below = Callable[[int, str], int]
"""A decision: an integer in `range(n)`, under a label."""


class Inode:
    """What a name stands for. `path` is the name it was made by, `links` how many it has now."""

    kind: int
    """Its type, as in `st_mode`."""

    def __init__(self, number: int, path: str, permissions: int, now_s: float) -> None:
        self.number, self.path = number, path
        self.permissions = permissions
        self.links = self.opened = 0
        self.read_s = self.written_s = self.changed_s = now_s

    @property
    def size(self) -> int:
        """Its length in bytes, as `st_size` has it."""
        return PAGE_BYTES


class Folder(Inode):
    """Names, as processes see them, and as they are on the platter."""

    kind = stat.S_IFDIR

    def __init__(
        self, number: int, path: str, permissions: int, now_s: float, parent: Folder | None = None
    ) -> None:
        super().__init__(number, path, permissions, now_s)
        self.parent: Folder = parent or self
        self.entries: dict[str, Inode] = {}
        self.durable: dict[str, Inode] = {}


class Symlink(Inode):
    """A name that stands for another path."""

    kind = stat.S_IFLNK

    def __init__(self, number: int, path: str, permissions: int, now_s: float, target: str) -> None:
        super().__init__(number, path, permissions, now_s)
        self.target = target

    @property
    def size(self) -> int:
        return len(self.target.encode())


class Write(NamedTuple):
    """Bytes that were written `at` an offset; without any, the length was set to `at`."""

    at: int
    data: bytes | None

    def onto(self, content: bytearray) -> None:
        """Do it to `content`; what lies between its end and the offset becomes zeros."""
        end = self.at if self.data is None else self.at + len(self.data)
        if end > len(content):
            content.extend(bytes(end - len(content)))
        if self.data is None:
            del content[end:]
        else:
            content[self.at : end] = self.data

    def pages(self) -> Iterator[Write]:
        """The same page by page."""
        if self.data is None:
            yield self
            return
        start = 0
        while start < len(self.data):
            size = PAGE_BYTES - (self.at + start) % PAGE_BYTES
            yield Write(self.at + start, self.data[start : start + size])
            start += size


class File(Inode):
    """Bytes in the buffer (`data`), on the platter (`durable`), and the writes that lie between."""

    kind = stat.S_IFREG

    def __init__(self, number: int, path: str, permissions: int, now_s: float) -> None:
        super().__init__(number, path, permissions, now_s)
        self.data, self.durable = bytearray(), bytearray()
        self.waiting: deque[Write] = deque()

    @property
    def size(self) -> int:
        return len(self.data)

    def write(self, write: Write) -> None:
        """Do it in the buffer."""
        write.onto(self.data)
        self.waiting.append(write)
        if len(self.waiting) > WAITING_MAX:
            self.waiting.popleft().onto(self.durable)

    def sync(self) -> None:
        """Carry the buffer to the platter."""
        while self.waiting:
            self.waiting.popleft().onto(self.durable)

    def lose_power(self, below: Below, label: str) -> str:
        """Decide what of the waiting writes reached the platter, and read that back; in a word."""
        writes = list(self.waiting)
        self.waiting.clear()
        pages = [page for write in writes for page in write.pages()]
        # The last answer needs a later page that is there and an earlier one that is not.
        fate = below(4 if len(pages) > 1 else 3, label) if writes else 0
        if fate == 1:
            writes = []
        elif fate == 2:
            torn = len(writes) - 1 - below(len(writes), f"{label}, torn write from the end")
            at, data = writes[torn]
            size = 1 if data is None else len(data)
            kept = size - 1 - below(size, f"{label}, bytes missing")
            writes[torn:] = [Write(at, data[:kept])] if data and kept else []
        elif fate == 3:
            del pages[below(len(pages) - 1, f"{label}, missing page")]
            writes = pages
        for write in writes:
            write.onto(self.durable)
        self.data = bytearray(self.durable)
        return ("kept", "lost", "torn", "a page missing")[fate]
