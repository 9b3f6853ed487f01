"""A worker whose network cable is pulled: it sits in a network namespace of its own.

Unlike a proxy's cut, nobody is told: packets vanish, and both ends have to notice by themselves.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import trio

from tests import needs
from tests.cluster.processes import PATIENT, Cluster, Member, chat, open_cluster, start, until
from tests.processes.proxy import open_proxy
from trinamo.transports.etcd import open_etcd

DONE = "data: [DONE]"
HOST, GUEST = "10.231.77.1", "10.231.77.2"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(httpx|httpcore|Response.aiter).*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@attrs.frozen
class Cable:
    """Two interfaces, one here and one in a namespace."""

    namespace: str
    here: str

    @property
    def launcher(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace)

    def pull(self) -> None:
        ip("link", "set", self.here, "down")

    def plug(self) -> None:
        ip("link", "set", self.here, "up")


@pytest.fixture
def cable() -> Iterator[Cable]:
    if not needs.can_make_networks():
        needs.NETWORKS.lacking()
    number = os.getpid() % 100_000
    made = Cable(f"trinamo-{number}", f"tri{number}a")
    there = f"tri{number}b"
    ip("netns", "add", made.namespace)
    try:
        ip("link", "add", made.here, "type", "veth", "peer", "name", there)
        ip("link", "set", there, "netns", made.namespace)
        ip("addr", "add", f"{HOST}/30", "dev", made.here)
        ip("link", "set", made.here, "up")
        ip("-n", made.namespace, "addr", "add", f"{GUEST}/30", "dev", there)
        ip("-n", made.namespace, "link", "set", there, "up")
        ip("-n", made.namespace, "link", "set", "lo", "up")
        yield made
    finally:
        ip("netns", "del", made.namespace)


KEEPALIVE = {
    "data_plane.tcp.keepalive_idle_s": 1,
    "data_plane.tcp.keepalive_interval_s": 1,
    "data_plane.tcp.keepalive_count": 2,
    "data_plane.tcp.user_timeout_s": 3,
    "control_plane.etcd.lease_ttl_s": 10,
    "control_plane.etcd.silence_s": 2,
    "event_plane.nats.ping_interval_s": 1,
}


@asynccontextmanager
async def guest_worker(
    cluster: Cluster, cable: Cable, log: Path, secret: Path
) -> AsyncIterator[Member]:
    """A worker at the far end of the cable, which reaches everything over it."""
    async with (
        open_proxy(cluster.etcd.address, bind=HOST) as etcd,
        open_proxy(cluster.nats.address, bind=HOST) as nats,
    ):
        settings: dict[str, Any] = {
            **PATIENT,
            **KEEPALIVE,
            "control_plane.etcd.endpoints": etcd.address,
            "event_plane.nats.servers": f"nats://{nats.address}",
            "event_plane.nats.token": cluster.nats.token,
            "event_plane.nats.allow_plain_password": True,
            "worker.engine": "exact",
            "data_plane.tcp.host": GUEST,
            "security.secret_file": secret,
            "worker.status_host": GUEST,
        }
        worker = await start("worker", settings, log, launcher=cable.launcher)
        try:
            yield worker
        finally:
            cable.plug()
            await worker.stop()
            assert worker.process.stdout is not None
            await worker.process.stdout.aclose()


async def lease_is_over(cluster: Cluster, instance_id: str) -> None:
    """Return once discovery has forgotten the instance."""
    async with open_etcd(cluster.etcd.address) as control:

        async def is_gone() -> bool:
            found = await control.range("")
            return not any(instance_id in entry.key for entry in found.entries)

        await until(is_gone, "the lease has run out")


async def test_a_pulled_cable_ends_the_stream_on_both_sides_and_the_worker_comes_back(
    cable: Cable, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("known on both ends of the cable, and nowhere else")
    secret.chmod(0o600)
    settings = {**KEEPALIVE, "data_plane.tcp.host": HOST, "security.secret_file": secret}
    settings |= {"http.queue_max": 0, "router.wait_s": 10}
    async with (
        open_cluster(tmp_path, workers=0, settings=settings) as cluster,
        guest_worker(cluster, cable, tmp_path / "guest.log", secret) as worker,
    ):
        await cluster.wait_models()
        await cluster.wait_live(1)
        status_url = worker.facts["status_url"]
        body = chat("a long story", stream=True, max_tokens=4000, temperature=0)
        rest = [DONE]
        while rest[-1] == DONE:
            # Another answer, where all of one had come by then.
            cable.plug()
            await cluster.wait_live(1)
            async with cluster.client.stream(
                "POST", f"{cluster.url}/v1/chat/completions", json=body
            ) as response:
                lines = response.aiter_lines()
                await anext(lines)
                cable.pull()
                with trio.fail_after(300):
                    rest = [line async for line in lines if line]
        await cluster.wait_live(0)
        refused = await cluster.client.post(
            f"{cluster.url}/v1/chat/completions", json=chat("hello")
        )
        # The frontend knew at once, by the connection; another life begins only after the lease.
        await lease_is_over(cluster, worker.facts["instance_id"])
        cable.plug()
        await cluster.wait_live(1)

        async def serves() -> bool:
            answer = await cluster.client.post(
                f"{cluster.url}/v1/chat/completions", json=chat("hello", max_tokens=4)
            )
            return answer.status_code == 200

        await until(serves, "the worker is asked again")
        async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
            health = (await client.get(f"{status_url}/health")).json()
        in_flight = await cluster.metric(status_url, "worker_requests_in_flight")

    assert '"error"' in rest[-1]
    assert refused.status_code in (404, 503)
    assert health["instance_id"] == worker.facts["instance_id"]
    assert health["incarnation"] >= 2
    assert in_flight == 0
