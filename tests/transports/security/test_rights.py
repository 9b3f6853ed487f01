"""What `trinamo certs rights` prints is enough for a cluster, and no more than it says."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import trio
from msgspec.structs import replace

from tests.cluster.processes import Member, chat, start, until
from tests.conformance.control.etcd_members import PATIENT as PATIENT_ETCD
from tests.transports.nats.brokers import PATIENT as PATIENT_NATS, private_server
from trinamo.cli.up.certs import write_secret
from trinamo.cli.up.rights import rights_text
from trinamo.runtime.config.keys import Secret
from trinamo.runtime.config.planes import EtcdConfig, NatsConfig
from trinamo.runtime.errors import ControlPlaneError
from trinamo.transports.etcd import open_etcd
from trinamo.transports.nats import open_nats
from trinamo.transports.security.roles import Role
from trinamo.transports.servers import open_etcd_server
from trinamo.transports.servers.binaries import find_etcd, find_nats_server

pytestmark = pytest.mark.check

ROLES = (Role.FRONTEND, Role.WORKER, Role.PREFILL, Role.OPERATOR)
PASSWORD = "a-password-of-this-test"


@attrs.frozen
class Guarded:
    """etcd and NATS that give each role its rights."""

    etcd: str
    nats: str
    log: Path
    """Of nats-server, which says whom it denied what."""

    def user(self, role: Role) -> dict[str, Any]:
        name = f"trinamo-{role}"
        return {
            "control_plane.etcd.endpoints": self.etcd,
            "control_plane.etcd.username": name,
            "control_plane.etcd.password": PASSWORD,
            "event_plane.nats.servers": self.nats,
            "event_plane.nats.username": name,
            "event_plane.nats.password": PASSWORD,
        }

    def etcd_section(self, role: Role) -> EtcdConfig:
        return replace(PATIENT_ETCD, username=f"trinamo-{role}", password=Secret(PASSWORD))

    def nats_section(self, role: Role) -> NatsConfig:
        return replace(PATIENT_NATS, username=f"trinamo-{role}", password=Secret(PASSWORD))


@asynccontextmanager
async def guarded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Guarded]:
    """As somebody sets them up who pastes what is printed."""
    texts = {role: list(rights_text(role, "trinamo")) for role in ROLES}
    users = []
    for role, lines in texts.items():
        users += lines[lines.index(next(each for each in lines if each.startswith("{ user"))) :]
        monkeypatch.setenv(f"TRINAMO_{role.upper()}_PASSWORD", PASSWORD)
    settings, log = directory / "nats.conf", directory / "nats.log"
    said = "\n".join(users)
    settings.write_text(
        f'jetstream {{ store_dir: "{directory}/store" }}\nlog_file: "{log}"\n'
        f"authorization {{ users: [\n{said}\n] }}\n"
    )
    nats = private_server(find_nats_server(), "--config", str(settings))
    async with open_etcd_server() as etcd:
        tool = find_etcd().with_name("etcdctl")

        def administer(*words: str) -> None:
            command = [str(tool), "--endpoints", etcd.endpoint, *words]
            subprocess.run(command, env={**os.environ, "ETCDCTL_API": "3"}, check=True, timeout=120)

        for words in (
            ("user", "add", f"root:{PASSWORD}"),
            ("role", "add", "root"),
            ("user", "grant-role", "root", "root"),
        ):
            administer(*words)
        for lines in texts.values():
            for line in lines:
                if line.startswith("etcdctl "):
                    _, *given = shlex.split(line)
                    if given[:2] == ["user", "add"]:
                        given[2] += f":{PASSWORD}"
                    administer(*given)
        administer("auth", "enable")
        with nats as server:
            yield Guarded(etcd.endpoint, server.url, log)


@pytest.mark.parametrize(("mode", "requests"), [("decode_first", "nats"), ("prefill_first", "tcp")])
async def test_a_cluster_answers_with_the_least_that_its_roles_need(
    tmp_path: Path, mode: str, requests: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    write_secret(secret)
    members: list[Member] = []
    common = {
        "security.secret_file": secret,
        "worker.engine": "exact",
        "http.port": 0,
        "router.policy": "kv",
        "data_plane.requests": requests,
        "disaggregation.mode": mode,
        "disaggregation.prefill_tokens_local_max": 32,
    }
    async with guarded(tmp_path, monkeypatch) as planes, httpx.AsyncClient(timeout=60) as client:
        try:
            for name, role in (("decode", Role.WORKER), ("prefill", Role.PREFILL)):
                own = common | planes.user(role) | {"worker.role": name}
                members.append(await start("worker", own, tmp_path / f"{name}.log"))
            own = common | planes.user(Role.FRONTEND)
            frontend = await start("frontend", own, tmp_path / "frontend.log")
            members.append(frontend)

            async def is_answered() -> bool:
                url = f"{frontend.facts['url']}/v1/chat/completions"
                said = await client.post(url, json=chat("abcdefgh" * 20, max_tokens=4))
                text = (await client.get(f"{members[0].facts['status_url']}/metrics")).text
                remote = [
                    line
                    for line in text.splitlines()
                    if line.startswith("trinamo_prefills_total{") and 'where="remote"' in line
                ]
                return said.status_code == 200 and any(not each.endswith(" 0.0") for each in remote)

            await until(is_answered, "a prompt is computed by the prefill worker")
        finally:
            with trio.CancelScope(shield=True):
                for member in reversed(members):
                    await member.stop()
        denied = [line for line in planes.log.read_text().splitlines() if "Violation" in line]
        assert denied == []
    for name in ("decode", "prefill", "frontend"):
        assert "permission denied" not in (tmp_path / f"{name}.log").read_text()


async def test_what_a_role_does_not_need_is_denied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded(tmp_path, monkeypatch) as planes:
        for role, key in (
            (Role.FRONTEND, "instances/a/b/c/1"),
            (Role.WORKER, "config/router.policy"),
            (Role.PREFILL, "models/m/1"),
            (Role.WORKER, "anything/else"),
        ):
            async with open_etcd(planes.etcd, planes.etcd_section(role)) as plane:
                with pytest.raises(ControlPlaneError, match="permission denied"):
                    await plane.put(key, b"mine")
        async with open_etcd(planes.etcd, planes.etcd_section(Role.OPERATOR)) as plane:
            await plane.put("config/router.policy", b"mine")
        for role in (Role.WORKER, Role.PREFILL, Role.OPERATOR):
            async with open_nats([planes.nats], planes.nats_section(role)) as events:
                await events.try_write()
        async with open_nats([planes.nats], planes.nats_section(Role.FRONTEND)) as events:
            await events.publish("trinamo.load.a.b.c.event.1", b"idle")
            await events.publish("anything.else", b"")

            async def is_denied() -> bool:
                said = await trio.Path(planes.log).read_text()
                return said.count("Publish Violation") >= 2

            await until(is_denied, "both are denied")


def test_the_rights_are_those_below_the_key_prefix() -> None:
    lines = [each for each in rights_text(Role.WORKER, "trinamo", "team-a/") if "--prefix" in each]
    assert lines
    assert all(each.split()[-1].startswith("team-a/") for each in lines)


def test_the_users_of_one_prefix_are_not_those_of_another() -> None:
    """Pasted for two clusters of one etcd, the rights of one must not be added to the other's user."""
    names = {
        line.split()[3]
        for prefix in ("", "team-a/", "team-b/", "team-a/sub/")
        for line in rights_text(Role.WORKER, "trinamo", prefix)
        if line.startswith(("etcdctl role add", "etcdctl user add"))
    }
    assert names == {
        "trinamo-worker",
        "trinamo-team-a-worker",
        "trinamo-team-b-worker",
        "trinamo-team-a-sub-worker",
    }
