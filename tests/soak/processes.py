"""The processes of a soak: each can be killed, ended or stopped, and comes back under its old name.

They die with the harness, whatever ends it. A worker or frontend that cannot start, since etcd is away
say, is started again, as a supervisor would. Read `soak.py` next.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from tests.cluster.processes import ROLE
from trinamo.transports.servers.embedded import EmbeddedServer
from trinamo.transports.servers.process import signal_group, spawn, terminate, wait_exit

START_S: Final = 60.0
"""So long a start may take; then it is a failure of its own."""
END_S: Final = 60.0
"""And an end after SIGTERM: the deadlines of the section `shutdown` add up to half of it."""
RETRY_S: Final = 1.0

Complain = Callable[[str], None]


@attrs.define(eq=False)
class Process:
    """A worker or a frontend, through all its lives."""

    name: str
    role: str
    """`frontend`, or that of a worker."""
    settings: dict[str, Any]
    log: Path
    complain: Complain
    """Called with what no fault of the plan explains."""
    needs: Sequence[Server]
    """Without one of these it cannot start."""
    facts: dict[str, Any] = attrs.field(factory=dict)
    """What it said when it was ready; empty while it is not."""
    lives: int = 0
    born_s: float = 0.0
    """When it was ready last."""
    is_wanted: bool = True
    """False while a fault holds it down: nobody should count on it."""
    _child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return 0 if self._child is None or self._child.poll() is not None else self._child.pid

    @property
    def is_up(self) -> bool:
        return self.is_wanted and bool(self.facts) and self.pid != 0

    @property
    def status_url(self) -> str:
        return str(self.facts.get("status_url") or self.facts.get("url") or "")

    async def start(self) -> None:
        """Start it, again and again if it must, and return once it serves.

        It has its time from when all servers are there: the plan may leave none for a minute.
        """
        with trio.move_on_after(START_S) as patience:
            while not await self._born(patience):
                await trio.sleep(RETRY_S)
            self.is_wanted = True
            return
        self.complain(f"{self.name} did not start within {START_S:g} s")

    async def _born(self, patience: trio.CancelScope) -> bool:
        role = "frontend" if self.role == "frontend" else "worker"
        command = [sys.executable, str(ROLE), role]
        command += [f"{key}={value}" for key, value in self.settings.items()]
        begun = self.log.stat().st_size if self.log.exists() else 0
        self.facts = {}
        self._child = child = spawn(command, log_path=self.log, environ={"PYTHONWARNINGS": ""})
        while child.poll() is None:
            for line in self._lines(begun):
                self.facts = line
                self.lives += 1
                self.born_s = trio.current_time()
                return True
            if not all(each.is_up for each in self.needs):
                patience.deadline = trio.current_time() + START_S
            await trio.sleep(0.1)
        return False

    def _lines(self, begun: int) -> Iterator[dict[str, Any]]:
        """What this life has said to whoever started it: the lines that are none of the log."""
        with self.log.open("rb") as file:
            file.seek(begun)
            for line in file:
                if line.startswith(b"{") and line.endswith(b"\n") and b'"event":' not in line:
                    yield json.loads(line)

    async def watch(self) -> None:
        """Start it again when it ends unasked, and say so; runs until cancelled."""
        while True:
            child = self._child
            if child is None or not self.facts or not self.is_wanted:
                await trio.sleep(0.2)
                continue
            status = await wait_exit(child)
            if child is self._child and self.is_wanted:
                self.complain(f"{self.name} ended unasked with status {status}, see {self.log}")
                await self.start()

    async def kill(self) -> None:
        """SIGKILL."""
        self.is_wanted = False
        if self._child is not None:
            signal_group(self._child, signal.SIGKILL)
            await wait_exit(self._child)
        self.facts = {}

    async def end(self) -> None:
        """SIGTERM, and the wait for its end."""
        self.is_wanted = False
        child, was_ready = self._child, bool(self.facts)
        if child is None or child.poll() is not None:
            return
        signal_group(child, signal.SIGTERM)
        with trio.move_on_after(END_S):
            status = await wait_exit(child)
            if status and was_ready:
                self.complain(f"{self.name} ended with status {status} on SIGTERM, see {self.log}")
            self.facts = {}
            return
        self.complain(f"{self.name} did not end within {END_S:g} s of SIGTERM, see {self.log}")
        await self.kill()

    def freeze(self) -> None:
        self.is_wanted = False
        if self._child is not None:
            signal_group(self._child, signal.SIGSTOP)

    def thaw(self) -> None:
        if self._child is not None:
            signal_group(self._child, signal.SIGCONT)
        self.is_wanted = True

    async def close(self) -> None:
        """End it by force if it must."""
        self.is_wanted = False
        if self._child is not None:
            with trio.CancelScope(shield=True):
                await terminate(self._child, grace_s=5)


@attrs.define(eq=False)
class Server:
    """etcd or NATS under the same verbs."""

    server: EmbeddedServer
    is_wanted: bool = True

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def pid(self) -> int:
        return self.server.pid

    @property
    def is_up(self) -> bool:
        return self.is_wanted

    async def start(self) -> None:
        await self.server.start()
        self.is_wanted = True

    async def kill(self) -> None:
        self.is_wanted = False
        await self.server.kill()

    async def end(self) -> None:
        self.is_wanted = False
        await self.server.stop()

    def freeze(self) -> None:
        self.is_wanted = False
        self.server.freeze()

    def thaw(self) -> None:
        self.server.thaw()
        self.is_wanted = True


def rss_bytes(pid: int) -> int:
    """Resident memory; 0 if there is no such process."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGESIZE")


def descriptors_of(pid: int) -> int:
    """How many descriptors a process holds, of whatever kind; 0 if there is no such process."""
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0


def disk_bytes(folder: Path) -> int:
    """The sizes of all files below a folder, but for those that etcd makes 64 MB long beforehand."""
    total = 0
    for path in folder.rglob("*"):
        # One that goes meanwhile counts nothing.
        with suppress(OSError):
            total += 0 if path.suffix in (".wal", ".tmp") else path.lstat().st_size
    return total


def sockets_of(pid: int) -> int:
    """How many sockets a process holds."""
    count = 0
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                count += str(link.readlink()).startswith("socket:")
            except OSError:
                continue
    except OSError:
        return 0
    return count
