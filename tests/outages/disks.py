"""Small disks, which fill up: file systems in memory that go with the process that holds them, whatever ends it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from signal import SIGKILL
from typing import Final

import attrs
import trio

from tests import needs
from tests.cluster.processes import until
from trinamo.transports.servers.process import signal_group, spawn

_HOLD: Final = 'mount -t tmpfs -o size="$2" tmpfs "$1" && echo mounted && exec sleep infinity'
_PIECE: Final = bytes(4096)


@attrs.frozen
class Disk:
    """Where it is for every process of this user, and what fills it."""

    path: Path

    def fill(self) -> None:
        """Leave no room for anything."""
        with suppress(OSError), (self.path / "filler").open("ab", buffering=0) as file:
            while True:
                file.write(_PIECE)

    def empty(self) -> None:
        """Take away what `fill` has written."""
        (self.path / "filler").unlink()


@asynccontextmanager
async def small_disk(folder: Path, megabytes: int) -> AsyncIterator[Disk]:
    """So large a one, while inside. Skips the test where this user may make none."""
    if not needs.can_make_networks():
        needs.NETWORKS.lacking()
    await trio.Path(folder).mkdir()
    log = folder.with_name(f"{folder.name}.log")
    words = (
        "/usr/bin/env",
        "unshare",
        "--mount",
        "sh",
        "-c",
        _HOLD,
        "sh",
        str(folder),
        f"{megabytes}m",
    )
    holder = spawn(words, log_path=log)
    try:

        async def is_mounted() -> bool:
            assert holder.poll() is None, log.read_text()
            return "mounted" in log.read_text()

        await until(is_mounted, "the disk is there")
        # Mounted in the holder's name space alone, and reached by all who may look into it.
        yield Disk(Path(f"/proc/{holder.pid}/root{folder}"))
    finally:
        signal_group(holder, SIGKILL)
        holder.wait()
