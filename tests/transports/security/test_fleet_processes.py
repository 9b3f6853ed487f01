"""A fleet with an authority of its own, as real processes: each has a certificate of its role."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.cluster.processes import Cluster, Member, chat, open_cluster, start, until
from tests.transports.security.fleets import FleetOfTest
from trinamo.cli.up.certs import write_secret
from trinamo.runtime.config.config import SecurityTlsConfig
from trinamo.runtime.env import RealEnv

pytestmark = pytest.mark.check


def shown(section: SecurityTlsConfig) -> dict[str, Any]:
    keys = ("certificate_file", "key_file", "authority_file")
    return {f"security.tls.{key}": getattr(section, key) for key in keys}


def joining(cluster: Cluster, secret: Path, engine: str = "echo") -> dict[str, Any]:
    return {
        "control_plane.etcd.endpoints": cluster.etcd.endpoint,
        "event_plane.nats.servers": cluster.nats.url,
        "event_plane.nats.token": cluster.nats.token,
        "security.secret_file": secret,
        "worker.engine": engine,
    }


async def end(members: Sequence[Member]) -> None:
    with trio.CancelScope(shield=True):
        for member in members:
            await member.stop()


@pytest.mark.parametrize(
    ("mode", "roles"),
    [
        ("decode_first", ["aggregated"]),
        ("decode_first", ["decode", "prefill"]),
        ("prefill_first", ["decode", "prefill"]),
    ],
)
async def test_each_with_its_role_they_answer_and_a_renewed_certificate_is_shown(
    tmp_path: Path, mode: str, roles: list[str]
) -> None:
    fleet, secret = FleetOfTest.make(tmp_path / "fleet"), tmp_path / "secret"
    write_secret(secret)
    settings = shown(fleet.section("frontend")) | {"security.secret_file": secret}
    members: list[Member] = []
    async with open_cluster(tmp_path, workers=0, settings=settings) as cluster:
        try:
            for role in roles:
                tls = shown(fleet.section("prefill" if role == "prefill" else "worker", name=role))
                own = joining(cluster, secret, "exact") | tls | {"worker.role": role}
                own |= {"disaggregation.mode": mode, "disaggregation.prefill_tokens_local_max": 32}
                members.append(await start("worker", own, tmp_path / f"{role}.log"))
            await cluster.wait_models()
            await cluster.wait_live(1)
            asked, numbers = f"{cluster.url}/v1/chat/completions", itertools.count()

            async def is_answered() -> bool:
                # Another prompt each time: what was computed once is kept, and asked of nobody.
                body = chat(f"{next(numbers)} " + "abcdefgh" * 20, max_tokens=4)
                said = await cluster.client.post(asked, json=body)
                assert said.status_code == 200, said.text
                if len(roles) == 1:
                    return True
                # Until they have found each other, who decodes computes the prompt itself.
                where = str(members[0].facts["status_url"])
                return await cluster.metric(where, "prefills_total", where="remote", mode=mode) > 0

            await until(is_answered, "all of them have taken part in an answer")

            fleet.section("frontend", days=9)

            async def is_renewed() -> bool:
                expiry = "certificate_expiry_timestamp_seconds"
                ends_at = await cluster.metric(cluster.url, expiry, use="members")
                return ends_at > RealEnv().clock.wall() + 8 * 86400

            await until(is_renewed, "the frontend shows the new certificate")
            assert await is_answered()
        finally:
            await end(members)


async def test_a_frontend_s_certificate_starts_no_worker(tmp_path: Path) -> None:
    fleet, secret = FleetOfTest.make(tmp_path / "fleet"), tmp_path / "secret"
    write_secret(secret)
    settings = shown(fleet.section("frontend")) | {"security.secret_file": secret}
    async with open_cluster(tmp_path, workers=0, settings=settings) as cluster:
        own, log = joining(cluster, secret) | shown(fleet.section("frontend")), tmp_path / "w.log"
        with pytest.raises(AssertionError, match="did not start"):
            await start("worker", own, log)
    assert "says frontend, and this process is to take requests" in log.read_text()
