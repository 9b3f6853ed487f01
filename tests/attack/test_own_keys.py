"""What a living cluster has registered, deleted and overwritten by a stranger with a real etcd."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.processes import Cluster, chat, open_cluster, until
from trinamo.runtime.planes import ControlPlane, Entry
from trinamo.runtime.protocol.discovery.instances import INSTANCE_PREFIX
from trinamo.runtime.protocol.discovery.model_cards import MODEL_PREFIX
from trinamo.transports.etcd import open_etcd

pytestmark = [pytest.mark.slow, pytest.mark.services]


async def registered(store: ControlPlane) -> dict[str, Entry]:
    found = [
        *(await store.range(INSTANCE_PREFIX)).entries,
        *(await store.range(MODEL_PREFIX)).entries,
    ]
    return {each.key: each for each in found}


async def is_answered(cluster: Cluster) -> bool:
    body = chat("hi", model="echo", max_tokens=4)
    response = await cluster.client.post(f"{cluster.url}/v1/chat/completions", json=body)
    return response.status_code == 200


@pytest.mark.parametrize("value", [None, b"", b"\xff\x00 no card"], ids=["gone", "empty", "junk"])
async def test_keys_that_a_stranger_takes_away_come_back_and_requests_are_answered(
    value: bytes | None, tmp_path: Path
) -> None:
    """Before: 404 or 503 for good, though the lease lived and nothing else was wrong."""
    async with (
        open_cluster(tmp_path, workers=1, engine="echo") as cluster,
        open_etcd([cluster.etcd.endpoint]) as store,
    ):
        before = await registered(store)
        assert len(before) == 2
        for key in before:
            if value is None:
                await store.delete(key)
            else:
                await store.put(key, value)

        async def are_back() -> bool:
            now = await registered(store)
            return [(e.key, e.value, e.lease_id) for e in now.values()] == [
                (e.key, e.value, e.lease_id) for e in before.values()
            ]

        await until(are_back, "the keys are back, under the same lease")
        await until(lambda: is_answered(cluster), "a request is answered")
