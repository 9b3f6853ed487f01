"""The dashboard over real processes: prefill and decode workers under load, one of them killed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.cluster.processes import Cluster, chat, open_cluster
from tests.runtime.view import pages

pytestmark = [
    # httpx leaves generators of its own to the garbage collector when a stream is left.
    pytest.mark.filterwarnings("ignore:.*(httpx|httpcore|Response.aiter).*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ROLES = {"prefill", "decode"}
SECRET = "5ecret-of-this-cluster-alone-and-no-other"


async def ask_for_ever(cluster: Cluster) -> None:
    """One client after the other; what becomes of the answers is not the matter."""
    url, number = f"{cluster.url}/v1/chat/completions", 0
    while True:
        number += 1
        body = chat(f"{number} " + "abcdefgh " * 30, max_tokens=200, temperature=0)
        try:
            await cluster.client.post(url, json=body)
        except httpx.HTTPError:
            await trio.sleep(0.1)


async def until(events: AsyncIterator[Any], is_so: Any, what: str) -> Any:
    """The first snapshot that is so."""
    with trio.move_on_after(300):
        async for snapshot in events:
            if is_so(snapshot):
                return snapshot
    raise AssertionError(f"the page was not told that {what}")


async def test_a_cluster_under_load_is_shown_and_a_killed_worker_is_in_the_time_line(
    tmp_path: Path,
) -> None:
    """And no secret of the configuration is told, to whoever opens the page."""
    secret_file = tmp_path / "secret"
    secret_file.write_text(SECRET, "ascii")
    secret_file.chmod(0o600)
    settings = {
        "control_plane.etcd.lease_ttl_s": 10,
        "disaggregation.prefill_tokens_local_max": 32,
        "security.secret_file": secret_file,
    }
    roles = ("prefill", "decode", "decode")
    async with (
        open_cluster(tmp_path, roles=roles, engine="exact", settings=settings) as cluster,
        pages.page(cluster.client, f"{cluster.url}/dashboard/events") as events,
        trio.open_nursery() as load,
    ):
        for _ in range(4):
            load.start_soon(ask_for_ever, cluster)
        told: list[Any] = []

        def is_at_work(snapshot: Any) -> bool:
            told.append(snapshot)
            rates = [
                each["tokens_per_s"] for each in snapshot["instances"] if each["role"] == "decode"
            ]
            done = [each["done"] for one in snapshot["instances"] for each in one["backends"]]
            return (
                len(rates) == 2
                and all(rates)
                and any(done)
                and has_pairs(snapshot)
                and has_no_fault(snapshot)
            )

        def has_no_fault(snapshot: Any) -> bool:
            """All answer, and the frontend is seen at work."""
            roles = {each["role"] for each in snapshot["instances"]}
            if snapshot["away"] or len(snapshot["frontends"]) != 1 or roles != ROLES:
                return False
            (frontend,) = snapshot["frontends"]
            return bool(
                frontend["in_flight"] > 0
                and frontend["minutes"][-1][3] > 0  # Tokens of this minute.
                and frontend["first_token"]["+Inf"] > 0
                and snapshot["under_way"]
                and snapshot["under_way"][0]["instance"]
            )

        def has_pairs(snapshot: Any) -> bool:
            """Whoever began, a line is between a prefill worker and a decode worker."""
            roles = {each["id"]: each["role"] for each in snapshot["instances"]}
            pairs = [
                {each["role"], roles[peer]}
                for each in snapshot["instances"]
                for peer in each["moves"]
                if peer in roles
            ]
            assert all(pair == ROLES for pair in pairs)
            return bool(pairs)

        await until(events, is_at_work, "both decode workers generate, and blocks move")
        victims = {"decode": cluster.workers[1], "prefill": cluster.workers[0]}
        for role, victim in victims.items():
            name = victim.facts["instance_id"][:8]
            victim.kill()

            def is_told(snapshot: Any, name: str = name) -> bool:
                told.append(snapshot)
                kinds = {each["kind"] for each in snapshot["events"] if each["who"] == name}
                return {"outage", "left"} <= kinds

            snapshot = await until(events, is_told, f"the {role} worker was away, and left")
            outage = next(
                each
                for each in snapshot["events"]
                if each["who"] == name and each["kind"] == "outage"
            )
            assert outage["about"] == f"{role} worker"
            assert outage["until"] >= outage["at"]
        text = json.dumps(told) + (await cluster.client.get(f"{cluster.url}/status")).text
        load.cancel_scope.cancel()
    for secret in (SECRET, cluster.nats.token):
        assert secret
        assert secret not in text
