"""The disk's side: a file that is lent, and one that is being taken.

What is taken goes into a file beside its target, chunk after chunk. So what is there is a beginning of
the model, and whoever comes back after a crash checks it against the list of digests and goes on where
it stops to be right: nothing else is kept about it. Complete and checked as a whole, it is renamed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from ..errors import ConfigError, CorruptedError
from .messages import CHUNKS_MAX, Manifest

Hop = Callable[..., Awaitable[Any]]
"""Runs a function that waits for the disk: `trio.to_thread.run_sync`, or at once in a simulation."""
_LOCK_POLL_S: Final = 0.2


async def manifest_of(path: Path, chunk_bytes: int, hop: Hop) -> Manifest:
    """The digests of a file, read once, chunk by chunk.

    Raises `ConfigError` for one of too many chunks, and `OSError`.
    """
    whole, digests = hashlib.sha256(), bytearray()
    size = 0

    def step(data: bytes) -> None:
        nonlocal size
        size += len(data)
        whole.update(data)
        digests.extend(hashlib.sha256(data).digest())
        if len(digests) > len(whole.digest()) * CHUNKS_MAX:
            raise ConfigError(f"{path.name} has too many chunks; raise weights.chunk_bytes")

    file = await hop(path.open, "rb")
    try:
        while data := await hop(file.read, chunk_bytes):
            await hop(step, data)
    finally:
        file.close()
    return Manifest(whole.hexdigest(), size, chunk_bytes, bytes(digests))


def read_chunk(path: Path, offset: int, into: memoryview) -> None:
    """Fill `into` from the file; `CorruptedError` if it is not that long any more."""
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        done = 0
        while done < len(into):
            count = file.readinto(into[done:])
            if not count:
                raise CorruptedError(f"{path.name} has become shorter")
            done += count


@attrs.define(eq=False)
class PartialFile:
    """A beginning of a file that is being taken; made by `open_partial`, which holds its lock."""

    _target: Path
    _part: Path
    _descriptor: int
    _hop: Hop
    _whole: hashlib._Hash = attrs.field(factory=hashlib.sha256, init=False)
    manifest: Manifest | None = attrs.field(default=None, init=False)
    count: int = attrs.field(default=0, init=False)
    """Leading chunks that are here and right."""

    @property
    def byte_count(self) -> int:
        """Bytes of those chunks."""
        manifest = self.manifest
        if manifest is None:
            return 0
        return min(self.count * manifest.chunk_bytes, manifest.byte_count)

    @property
    def is_complete(self) -> bool:
        """Whether all chunks are here; `commit` checks the whole."""
        return self.manifest is not None and self.count == self.manifest.count

    async def begin(self, manifest: Manifest) -> None:
        """Go on after the chunks that are here and right by this list; the others are cut off.

        Raises `ConfigError` if the rest does not fit on the disk.
        """
        if self.manifest != manifest:
            self.manifest, self.count, self._whole = manifest, 0, hashlib.sha256()
            for offset, length in manifest.spans():
                if not await self._hop(self._is_here, manifest, offset, length):
                    break
                self.count += 1
            os.ftruncate(self._descriptor, self.byte_count)
        free = shutil.disk_usage(self._part.parent).free
        missing = manifest.byte_count - self.byte_count
        if missing > free:
            raise ConfigError(
                f"{self._part.parent} has {free} bytes free; the model needs {missing} more"
            )

    def _is_here(self, manifest: Manifest, offset: int, length: int) -> bool:
        data = os.pread(self._descriptor, length, offset)
        is_right = manifest.is_right(offset // manifest.chunk_bytes, memoryview(data))
        if is_right:
            self._whole.update(data)
        return is_right

    async def append(self, data: memoryview) -> None:
        """Write the next chunk; `CorruptedError` if these are not its bytes, and nothing is written."""
        await self._hop(self._append, data)

    def _append(self, data: memoryview) -> None:
        manifest = self.manifest
        assert manifest is not None, "begin first"
        if not manifest.is_right(self.count, data):
            raise CorruptedError(f"chunk {self.count} is not what its digest says")
        done, at = 0, self.count * manifest.chunk_bytes
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], at + done)
        self._whole.update(data)
        self.count += 1

    async def commit(self) -> None:
        """Let the file appear under its name, whole.

        Raises `CorruptedError` if it is not the file that was wanted, however right its chunks are;
        then nothing of it is kept.
        """
        manifest = self.manifest
        assert manifest is not None, "begin first"
        if self._whole.hexdigest() != manifest.sha256:
            self.manifest, self.count = None, 0
            os.ftruncate(self._descriptor, 0)
            raise CorruptedError("the chunks are right by their list, and the whole file is not")
        await self._hop(os.fsync, self._descriptor)
        self._part.replace(self._target)
        folder = os.open(self._target.parent, os.O_RDONLY)
        try:
            await self._hop(os.fsync, folder)
        finally:
            os.close(folder)


@asynccontextmanager
async def open_partial(target: Path, sha256: str, hop: Hop) -> AsyncIterator[PartialFile | None]:
    """What is there of a file, for us alone; None if the target is there by the time we have it.

    Waits while another process of this machine takes the same file. Raises `OSError`.
    """
    part = target.with_name(f".{target.name}.{sha256[:16]}.part")
    while (descriptor := _lock(part)) is None:  # noqa: ASYNC110 -- of another process
        await trio.sleep(_LOCK_POLL_S)
    try:
        yield None if _is_done(target, part) else PartialFile(target, part, descriptor, hop)
    finally:
        os.close(descriptor)


def _lock(part: Path) -> int | None:
    """A descriptor of the file that has this name now, locked for the life of the process."""
    part.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever had it may have renamed it meanwhile: then ours is the finished model.
        if part.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    os.close(descriptor)
    return None


def _is_done(target: Path, part: Path) -> bool:
    if target.is_file():
        part.unlink(missing_ok=True)
        return True
    return False
