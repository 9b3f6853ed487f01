"""A cluster changes its secret, or begins to use certificates, while it answers.

Real processes, restarted one after the other.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import attrs
import httpx
import pytest
import trio

from tests.cluster.processes import Cluster, Member, chat, open_cluster, start
from tests.transports.security.fleets import FleetOfTest
from trinamo.cli.up.certs import write_secret


@attrs.define
class Asked:
    """What clients saw who ask all the time."""

    url: str
    failed: list[str] = attrs.field(factory=list)
    asking: dict[int, str] = attrs.field(factory=dict)
    """Which frontend each client asks now."""
    answers: int = 0
    is_over: bool = False

    async def ask(self, client: httpx.AsyncClient, who: int) -> None:
        for number in itertools.count():
            if self.is_over:
                return
            self.asking[who] = self.url
            body = chat(f"tell me number {number}", max_tokens=8)
            response = await client.post(f"{self.url}/v1/chat/completions", json=body)
            if response.status_code != 200:
                self.failed.append(response.text)
            self.answers += 1

    async def move(self, url: str) -> None:
        """Have all ask another frontend; returns when nobody asks the one of before."""
        self.url = url
        while set(self.asking.values()) != {url}:
            await trio.sleep(0.01)


def _secrets(directory: Path) -> list[dict[str, object]]:
    """Before, and the three steps of "Another secret" in `docs/security.md`."""
    old, new = directory / "old.secret", directory / "new.secret"
    for each in (old, new):
        write_secret(each)
    keys = ("security.secret_file", "security.second_secret_file")
    files = [(old,), (old, new), (new, old), (new,)]
    return [dict(zip(keys, each, strict=False)) for each in files]


def _certificates(directory: Path) -> list[dict[str, object]]:
    """Before, and the three steps of "From the secret to an authority" there."""
    secret, fleet = directory / "cluster.secret", FleetOfTest.make(directory / "fleet")
    write_secret(secret)
    known: dict[str, object] = {"security.secret_file": secret}
    section = fleet.section("frontend", "worker")
    tls = {
        f"security.tls.{key}": getattr(section, key)
        for key in ("certificate_file", "key_file", "authority_file")
    }
    steps = [known | tls | {"security.tls.change": change} for change in ("admit", "show")]
    return [known, *steps, known | tls]


@pytest.mark.parametrize(
    ("steps_of", "requests"), [(_secrets, "tcp"), (_secrets, "nats"), (_certificates, "tcp")]
)
async def test_no_request_fails_while_a_cluster_changes_what_its_members_show(
    tmp_path: Path, steps_of: Callable[[Path], list[dict[str, object]]], requests: str
) -> None:
    """In the three steps of `docs/security.md`; a new process is there before an old one ends."""
    common: dict[str, object] = {"data_plane.requests": requests}
    before, *steps = steps_of(tmp_path)
    async with (
        AsyncExitStack() as stack,
        open_cluster(tmp_path, engine="exact", settings=before | common) as cluster,
        trio.open_nursery() as nursery,
    ):
        asked = Asked(cluster.url)
        members = [cluster.frontend, *cluster.workers]
        for who in range(4):
            nursery.start_soon(asked.ask, cluster.client, who)
        for number, step in enumerate(steps):
            settings = _joining(cluster) | common | step
            members = await _restarted(
                members, settings, tmp_path / f"step{number}", cluster, asked, stack
            )
        last = asked.answers
        while asked.answers < last + 20:
            await trio.sleep(0.05)
        asked.is_over = True

    assert asked.failed == []
    logs = _logs(tmp_path)
    assert len(logs) == 12
    strange = re.compile("is another|its certificate says|no member's of this cluster")
    assert [name for name, text in logs.items() if strange.search(text)] == []


def _logs(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.glob("*.log")}


def _joining(cluster: Cluster) -> dict[str, object]:
    return {
        "control_plane.etcd.endpoints": cluster.etcd.endpoint,
        "event_plane.nats.servers": cluster.nats.url,
        "event_plane.nats.token": cluster.nats.token,
        "worker.engine": "exact",
        "http.port": 0,
    }


async def _restarted(
    members: list[Member],
    settings: dict[str, object],
    logs: Path,
    cluster: Cluster,
    asked: Asked,
    stack: AsyncExitStack,
) -> list[Member]:
    """What takes the places of `members`, the first of which is the frontend."""
    began: list[Member] = []
    for number, before in enumerate(members):
        role = "worker" if number else "frontend"
        member = await start(role, settings, Path(f"{logs}-{role}{number}.log"))
        began.append(member)
        stack.push_async_callback(_end, member)
        if number == 0:
            cluster.frontend = member
            await cluster.wait_models()
            await cluster.wait_live(2)
            await asked.move(cluster.url)
        else:
            await cluster.wait_live(3)
        assert await before.stop() == 0
        await cluster.wait_live(2)
    return began


async def _end(member: Member) -> None:
    if member.is_running:
        await member.stop()
    assert member.process.stdout is not None
    await member.process.stdout.aclose()
