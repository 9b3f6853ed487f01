"""Brokers for the conformance suites: one interface over the memory broker and real servers."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, Protocol

import trio
from msgspec.structs import replace

from tests.servers import free_ports
from trinamo.runtime.config.planes import NatsConfig
from trinamo.runtime.errors import ConnectError
from trinamo.runtime.planes import EventPlane
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane
from trinamo.transports.nats import open_nats
from trinamo.transports.security.sealing import Sealer

PATIENT: Final = NatsConfig(connect_timeout_s=60, start_timeout_s=120)
"""For tests of a server that answers: it may stall."""
START_S: Final = 120.0


class Broker(Protocol):
    """What the suites need of a broker."""

    def connect(self, *secrets: bytes) -> AbstractAsyncContextManager[EventPlane]:
        """A new process's plane, with at most 64 messages waiting while the broker is away.

        Jobs are sealed with the first secret, except in memory.
        """
        ...

    async def stop(self) -> None: ...

    async def start(self) -> None: ...


class MemoryBrokerUnderTest:
    def __init__(self) -> None:
        self.broker = MemoryBroker()

    def open(self) -> EventPlane:
        return MemoryEventPlane(self.broker, buffered_max=64)

    @asynccontextmanager
    async def connect(self, *secrets: bytes) -> AsyncIterator[EventPlane]:
        del secrets
        yield self.open()

    async def stop(self) -> None:
        self.broker.stop()

    async def start(self) -> None:
        self.broker.start()


class NatsServerUnderTest:
    """A server that is shared, or a private one that may be killed."""

    def __init__(self, url: str, server: PrivateServer | None = None) -> None:
        self.url = url
        self.server = server

    @asynccontextmanager
    async def connect(self, *secrets: bytes) -> AsyncIterator[EventPlane]:
        async with open_nats(
            [self.url],
            replace(PATIENT, outgoing_messages_max=64),
            sealer=Sealer(secrets, random.Random()),
        ) as plane:
            yield plane

    async def stop(self) -> None:
        assert self.server is not None
        self.server.kill()

    async def start(self) -> None:
        assert self.server is not None
        await trio.to_thread.run_sync(self.server.start)


class PrivateServer:
    """A nats-server of one test, on one port through all its restarts."""

    def __init__(self, binary: Path, directory: Path, *arguments: str) -> None:
        (self.port,) = free_ports(1)
        self.url = f"nats://127.0.0.1:{self.port}"
        self.command = [str(binary), "-a", "127.0.0.1", "-p", str(self.port), *arguments]
        self.log_path = directory / "log"
        self.child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            self.child = subprocess.Popen(self.command, stdout=log, stderr=log)
        give_up_at = time.monotonic() + START_S
        while time.monotonic() < give_up_at:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=2) as probe:
                    probe.recv(1)
                    return
            except OSError:
                try:
                    self.child.wait(0.02)
                except subprocess.TimeoutExpired:
                    continue
                break
        raise RuntimeError(self.log_path.read_text())

    def kill(self) -> None:
        if self.child is not None:
            self.child.send_signal(signal.SIGKILL)
            self.child.wait()
            self.child = None


@contextmanager
def private_server(binary: Path, *arguments: str) -> Iterator[PrivateServer]:
    with tempfile.TemporaryDirectory(prefix="trinamo-tests-") as directory:
        server = PrivateServer(binary, Path(directory), *arguments)
        try:
            server.start()
            yield server
        finally:
            server.kill()


async def healthy(plane: EventPlane) -> bool:
    try:
        await plane.check_health()
    except ConnectError:
        return False
    return True


async def wait_away(plane: EventPlane) -> None:
    with trio.fail_after(120):
        while await healthy(plane):
            await trio.sleep(0.002)


async def wait_back(plane: EventPlane) -> None:
    with trio.fail_after(120):
        while not await healthy(plane):
            await trio.sleep(0.002)
