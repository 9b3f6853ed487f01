"""A worker or frontend that is frozen or killed in a cluster of real processes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.cluster.processes import Cluster, chat, open_cluster, until
from tests.outages.watching import OK, ask, incarnation, wait_registered

pytestmark = [
    # The client leaves a generator to the garbage collector when a stream is left early.
    pytest.mark.filterwarnings("ignore:.*(httpx|httpcore|Response.aiter).*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


async def freeze_past_the_leases(cluster: Cluster, lease_ttl_s: float) -> list[int]:
    """Stop etcd until every lease is over; the answers meanwhile, and until all are registered."""
    before = [await incarnation(worker) for worker in cluster.workers]
    answers: list[int] = []
    over_at = trio.current_time() + 1.5 * lease_ttl_s

    async def is_over() -> bool:
        answers.append(await ask(cluster))
        return trio.current_time() > over_at

    async def are_back() -> bool:
        answers.append(await ask(cluster))
        now = [await incarnation(worker) for worker in cluster.workers]
        return all(n > b for n, b in zip(now, before, strict=True))

    cluster.etcd.freeze()
    await until(is_over, "the leases are over")
    cluster.etcd.thaw()
    await until(are_back, "every worker has another lease")

    async def are_known() -> bool:
        answers.append(await ask(cluster))
        return cluster.frontend.log.read_text().count("has registered again") >= len(before)

    await until(are_known, "the frontend knows all of them again")
    return answers


async def test_a_frozen_worker_leaves_with_its_lease_and_a_frozen_store_loses_nobody(
    tmp_path: Path,
) -> None:
    settings = {
        "control_plane.etcd.lease_ttl_s": 10,
        "control_plane.etcd.silence_s": 1,
        "control_plane.etcd.request_timeout_s": 10,
        "data_plane.tcp.ack_timeout_s": 10,
    }
    async with open_cluster(tmp_path, settings=settings) as cluster:
        frozen = cluster.workers[0]
        frozen.freeze()
        await cluster.wait_live(1)
        answers = [await ask(cluster) for _ in range(6)]
        frozen.thaw()
        await cluster.wait_live(2)
        await wait_registered(cluster)

        async def serves() -> bool:
            answers.append(await ask(cluster))
            return await cluster.metric(frozen.facts["status_url"], "worker_requests_total") > 0

        await until(serves, "the worker that was frozen is given requests")
        async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
            health = (await client.get(f"{frozen.facts['status_url']}/health")).json()

        left = cluster.frontend.log.read_text().count(" left ")
        answers += await freeze_past_the_leases(cluster, settings["control_plane.etcd.lease_ttl_s"])
        told = cluster.frontend.log.read_text()

    assert told.count(" left ") == left == 1
    assert {*answers} == {OK}
    assert health["instance_id"] == frozen.facts["instance_id"]


async def test_workers_that_all_freeze_at_once_cost_a_request_a_retry(tmp_path: Path) -> None:
    """As many as `attempts_max`: it was a 502 that told nobody to ask again."""
    settings = {
        # Discovery names all of them for as long as they are frozen.
        "control_plane.etcd.lease_ttl_s": 600,
        "data_plane.tcp.ack_timeout_s": 1,
        "router.attempts_max": 3,
    }
    async with open_cluster(tmp_path, workers=3, settings=settings) as cluster:
        url = f"{cluster.url}/v1/chat/completions"
        for worker in cluster.workers:
            worker.freeze()
        with trio.fail_after(300):
            refused = await cluster.client.post(url, json=chat("hello"))
        for worker in cluster.workers:
            worker.thaw()

        async def serves() -> bool:
            return await ask(cluster) == OK

        await until(serves, "they answer again")

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "disconnected")
    assert refused.headers["retry-after"] == "1"


@asynccontextmanager
async def long_stream(cluster: Cluster) -> AsyncIterator[tuple[str, Any]]:
    """The worker and the lines of an answer that has begun and is far from its end."""
    body = chat("a long story", stream=True, max_tokens=2000, temperature=0)
    async with cluster.client.stream(
        "POST", f"{cluster.url}/v1/chat/completions", json=body
    ) as response:
        lines = response.aiter_lines()
        await anext(lines)
        yield response.headers["x-trinamo-worker"], lines


async def test_a_frozen_worker_s_stream_ends_while_etcd_is_frozen_too(tmp_path: Path) -> None:
    """Nobody deletes it: it is asked, and answers nobody. The other worker serves on."""
    settings = {
        "router.silence_grace_s": 10,
        "control_plane.etcd.silence_s": 1,
        "control_plane.etcd.request_timeout_s": 10,
        "data_plane.tcp.ack_timeout_s": 10,
        "router.migrations_max": 0,
    }
    async with open_cluster(tmp_path, engine="exact", settings=settings) as cluster:
        # Round robin: one stream on each worker.
        async with long_stream(cluster) as (_, first), long_stream(cluster) as (name, second):
            other, frozen = sorted(
                cluster.workers, key=lambda each: bool(each.facts["instance_id"] == name)
            )
            cluster.etcd.freeze()
            frozen.freeze()
            with trio.fail_after(300):
                ends = [
                    [line async for line in first if line][-1],
                    [line async for line in second if line][-1],
                ]
        answers = [await ask(cluster, max_tokens=2) for _ in range(6)]
        expected = {"left": 0, "unanswered": 1, "replaced": 0}
        found: dict[str, float] = {}

        async def is_counted() -> bool:
            for reason in expected:
                found[reason] = await cluster.metric(
                    cluster.url, "silent_requests_total", reason=reason
                )
            return sum(found.values()) > 0

        await until(is_counted, "the silent request is counted")
        await cluster.wait_live(1)
        frozen.thaw()

        async def is_idle() -> bool:
            url = frozen.facts["status_url"]
            return await cluster.metric(url, "worker_requests_in_flight") == 0

        await until(is_idle, "the worker that woke has heard Kill")
        served = await cluster.metric(other.facts["status_url"], "worker_requests_total")
        cluster.etcd.thaw()
        told = cluster.frontend.log.read_text()

    (error,) = (json.loads(end.removeprefix("data: ")) for end in ends if "[DONE]" not in end)
    assert error["error"]["code"] == "silent"
    assert "does not answer" in error["error"]["message"]
    assert found == expected
    assert answers == [OK] * 6
    assert served >= 1
    assert " left " not in told


async def kill_under_a_stream(cluster: Cluster) -> None:
    status_url = cluster.workers[0].facts["status_url"]
    while True:
        async with long_stream(cluster) as (_, lines):
            # A frozen frontend does not take all of an answer, so its worker is in the middle of it,
            # unless it had ended before: then another stream. `/metrics` may be a second old.
            cluster.frontend.freeze()
            await trio.sleep(1.1)
            if await cluster.metric(status_url, "worker_requests_in_flight") == 1:
                cluster.frontend.kill()
            cluster.frontend.thaw()
            async for _ in lines:
                pass


async def test_a_frozen_frontend_costs_time_only_and_a_killed_one_frees_everything(
    tmp_path: Path,
) -> None:
    async with open_cluster(tmp_path, workers=1, engine="exact") as cluster:
        async with long_stream(cluster) as (_, lines):
            cluster.frontend.freeze()
            await trio.sleep(1)
            cluster.frontend.thaw()
            rest = [line async for line in lines if line]
        answer = await ask(cluster)

        status_url = cluster.workers[0].facts["status_url"]
        with pytest.raises(httpx.HTTPError):
            await kill_under_a_stream(cluster)

        async def is_free() -> bool:
            gauges = [
                await cluster.metric(status_url, name)
                for name in ("worker_requests_in_flight", "worker_streams")
            ]
            return not any(gauges)

        await until(is_free, "the worker serves nobody")
        cancelled = await cluster.metric(status_url, "worker_cancellations_total")
        granted = await cluster.metric(status_url, "lease_state", state="granted")

    assert rest[-1] == "data: [DONE]"
    assert len(rest) > 400
    assert answer == OK
    assert cancelled == 1
    assert granted == 1
