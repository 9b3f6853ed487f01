"""A store that is restored from a backup, by etcd's own tools, while watches of it are open."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import trio

from tests.conformance.control.backends import eventually
from trinamo.runtime.config.planes import EtcdConfig
from trinamo.runtime.planes import Resync, Snapshot
from trinamo.transports.etcd import open_etcd
from trinamo.transports.servers import open_etcd_server
from trinamo.transports.servers.binaries import find_etcd

pytestmark = pytest.mark.check
RESTORED = {"config/kept": b"1"}


def run_tool(name: str, *words: str) -> None:
    tool = find_etcd().with_name(name)
    subprocess.run([tool, *words], env={"ETCDCTL_API": "3"}, check=True, capture_output=True)


async def test_watches_forget_what_a_backup_does_not_know(tmp_path: Path) -> None:
    """Though cluster, member and term are those of before, and other writes make up for the lost revisions."""
    data, backup = tmp_path / "data", tmp_path / "backup"
    async with open_etcd_server(data) as server:
        endpoint = server.address.replace("unix:", "unix://")
        async with (
            open_etcd(server.address, EtcdConfig(request_timeout_s=60)) as writer,
            open_etcd(server.address, EtcdConfig(request_timeout_s=60)) as plane,
            plane.watch("config/") as events,
        ):
            await eventually(lambda: writer.put("config/kept", b"1"))
            snapshot = await anext(events)
            assert isinstance(snapshot, Snapshot)
            await trio.to_thread.run_sync(
                run_tool, "etcdctl", "--endpoints", endpoint, "snapshot", "save", str(backup)
            )
            await writer.put("config/lost", b"1")
            await server.kill()
            shutil.rmtree(data)
            await trio.to_thread.run_sync(
                run_tool,
                *("etcdutl", "snapshot", "restore", str(backup), "--data-dir", str(data)),
                *("--name", "etcd", "--initial-cluster", "etcd=unix://peer:0"),
                *("--initial-advertise-peer-urls", "unix://peer:0"),
            )
            await server.restart()
            await eventually(lambda: writer.put("others", b"0"))
            for number in range(10):
                await writer.put("others", b"%d" % number)
            with trio.fail_after(300):
                event = await anext(events)
                while not isinstance(event, Resync):
                    event = await anext(events)
            assert {each.key: each.value for each in event.entries} == RESTORED
