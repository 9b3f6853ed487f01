"""The faults of the design's table against a real cluster of processes, one after the other.

Killed servers and a killed worker are in `tests/cluster`; here are servers that hang, that are cut
off, that forgot everything, a worker that hangs, and a frontend that dies or hangs.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.cluster.processes import Cluster, Member, chat, open_cluster, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.services,
    # The client leaves a generator to the garbage collector when a stream is left early.
    pytest.mark.filterwarnings("ignore:.*(httpx|httpcore|Response.aiter).*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
OK = 200


async def ask(cluster: Cluster) -> int:
    answer = await cluster.client.post(f"{cluster.url}/v1/chat/completions", json=chat("hello"))
    return answer.status_code


def urls(cluster: Cluster) -> list[str]:
    return [cluster.url, *(worker.facts["status_url"] for worker in cluster.workers)]


async def wait_metric(cluster: Cluster, name: str, value: float, **labels: str) -> None:
    """Until every process of the cluster shows this value."""

    async def is_reached() -> bool:
        found = [await cluster.metric(url, name, **labels) for url in urls(cluster)]
        return found == [value] * len(found)

    await until(is_reached, f"{name} is {value:g} everywhere")


async def incarnation(worker: Member) -> int:
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"{worker.facts['status_url']}/health")
    return int(answer.json()["incarnation"])


async def wait_registered(cluster: Cluster) -> None:
    async def all_granted() -> bool:
        states = [
            await cluster.metric(worker.facts["status_url"], "lease_state", state="granted")
            for worker in cluster.workers
        ]
        return all(states)

    await until(all_granted, "every worker has a lease")


async def test_etcd_frozen_cut_off_and_emptied_stops_no_request(tmp_path: Path) -> None:
    settings = {"control_plane.etcd.silence_s": 1, "control_plane.etcd.request_timeout_s": 2}
    async with open_cluster(tmp_path, settings=settings, linked=True) as cluster:
        pids = [member.pid for member in [cluster.frontend, *cluster.workers]]
        answers = [await ask(cluster)]
        await wait_metric(cluster, "control_plane_connected", 1)

        cluster.etcd.freeze()
        await wait_metric(cluster, "control_plane_connected", 0)
        answers += [await ask(cluster) for _ in range(3)]
        cluster.etcd.thaw()
        await wait_metric(cluster, "control_plane_connected", 1)

        await cluster.links["etcd"].cut()
        await wait_metric(cluster, "control_plane_connected", 0)
        answers += [await ask(cluster) for _ in range(3)]
        await cluster.links["etcd"].mend()
        await wait_metric(cluster, "control_plane_connected", 1)
        before = [await incarnation(worker) for worker in cluster.workers]

        await cluster.etcd.kill()
        shutil.rmtree(cluster.etcd.data_dir)
        await cluster.etcd.start()

        async def all_again() -> bool:
            now = [await incarnation(worker) for worker in cluster.workers]
            return all(n > b for n, b in zip(now, before, strict=True))

        await until(all_again, "every worker registered under a new lease")
        await wait_registered(cluster)
        await cluster.wait_live(2)
        await cluster.wait_models()
        answers += [await ask(cluster) for _ in range(3)]
        resyncs = await cluster.metric(cluster.url, "control_plane_resyncs_total")
        still = [m.pid for m in [cluster.frontend, *cluster.workers] if m.is_running]

    assert answers == [OK] * 10
    assert resyncs >= 1
    assert still == pids


async def test_nats_frozen_cut_off_and_restarted_stops_no_request(tmp_path: Path) -> None:
    settings = {"event_plane.nats.ping_interval_s": 0.5, "event_plane.nats.connect_timeout_s": 0.5}
    async with open_cluster(tmp_path, settings=settings, linked=True) as cluster:
        answers = [await ask(cluster)]
        await wait_metric(cluster, "event_plane_connected", 1)

        cluster.nats.freeze()
        await wait_metric(cluster, "event_plane_connected", 0)
        answers += [await ask(cluster) for _ in range(3)]
        cluster.nats.thaw()
        await wait_metric(cluster, "event_plane_connected", 1)

        await cluster.links["nats"].cut()
        await wait_metric(cluster, "event_plane_connected", 0)
        answers += [await ask(cluster) for _ in range(3)]
        await cluster.links["nats"].mend()
        await wait_metric(cluster, "event_plane_connected", 1)

        await cluster.nats.restart()
        await wait_metric(cluster, "event_plane_connected", 1)
        answers += [await ask(cluster) for _ in range(3)]
        made = [await cluster.metric(url, "event_plane_connections_total") for url in urls(cluster)]
        dropped = await cluster.metric(cluster.url, "event_plane_dropped_messages_total")

    assert answers == [OK] * 10
    assert min(made) >= 3
    assert dropped == 0


async def test_requests_over_nats_fail_with_a_status_while_it_is_away_and_work_after(
    tmp_path: Path,
) -> None:
    settings = {"data_plane.requests": "nats", "data_plane.tcp.ack_timeout_s": 1}
    async with open_cluster(tmp_path, settings=settings) as cluster:
        before = await ask(cluster)
        await cluster.nats.kill()
        away = await ask(cluster)
        await cluster.nats.start()
        await wait_metric(cluster, "event_plane_connected", 1)

        async def works() -> bool:
            return await ask(cluster) == OK

        await until(works, "requests are answered again")

    assert before == OK
    assert away in (502, 503, 504)


async def test_a_frozen_worker_leaves_with_its_lease_and_comes_back_as_itself(
    tmp_path: Path,
) -> None:
    settings = {"control_plane.etcd.lease_ttl_s": 2, "data_plane.tcp.ack_timeout_s": 1}
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
        async with httpx.AsyncClient(trust_env=False) as client:
            health = (await client.get(f"{frozen.facts['status_url']}/health")).json()

    assert {*answers} == {OK}
    assert health["instance_id"] == frozen.facts["instance_id"]


@asynccontextmanager
async def long_stream(cluster: Cluster) -> AsyncIterator[Any]:
    """The lines of an answer that has begun and is far from its end."""
    body = chat("a long story", stream=True, max_tokens=600, temperature=0)
    async with cluster.client.stream(
        "POST", f"{cluster.url}/v1/chat/completions", json=body
    ) as response:
        lines = response.aiter_lines()
        await anext(lines)
        yield lines


async def test_a_frozen_frontend_costs_its_streams_time_and_nothing_else(tmp_path: Path) -> None:
    async with open_cluster(tmp_path, workers=1, engine="exact") as cluster:
        async with long_stream(cluster) as lines:
            cluster.frontend.freeze()
            await trio.sleep(1)
            cluster.frontend.thaw()
            rest = [line async for line in lines if line]
        answer = await ask(cluster)

    assert rest[-1] == "data: [DONE]"
    assert len(rest) > 400
    assert answer == OK


async def kill_under_a_stream(cluster: Cluster) -> None:
    async with long_stream(cluster) as lines:
        status_url = cluster.workers[0].facts["status_url"]
        assert await cluster.metric(status_url, "worker_requests_in_flight") == 1
        cluster.frontend.kill()
        async for _ in lines:
            pass


async def test_a_killed_frontend_frees_everything_on_its_workers(tmp_path: Path) -> None:
    async with open_cluster(tmp_path, workers=1, engine="exact") as cluster:
        status_url = cluster.workers[0].facts["status_url"]
        with pytest.raises(httpx.HTTPError):
            await kill_under_a_stream(cluster)

        async def is_free() -> bool:
            gauges = [
                await cluster.metric(status_url, name)
                for name in ("worker_requests_in_flight", "worker_streams")
            ]
            return not any(gauges)

        await until(is_free, "the worker serves nobody", timeout_s=5)
        cancelled = await cluster.metric(status_url, "worker_cancellations_total")
        granted = await cluster.metric(status_url, "lease_state", state="granted")

    assert cancelled == 1
    assert granted == 1
