"""The faults of the design's table against a real cluster of processes, one after the other.

Killed servers and a killed worker are in `tests/cluster`; here are servers that hang, that are cut
off, that forgot everything, a worker that hangs, and a frontend that dies or hangs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.cli.places import COMMAND
from tests.cluster.processes import Cluster, Member, chat, open_cluster, until
from trinamo.cli.failures import EXIT_DEGRADED
from trinamo.cli.running.locating import Target
from trinamo.cli.status.survey import Survey, survey_cluster
from trinamo.runtime.config.config import load_config
from trinamo.runtime.process.settings import REQUESTS_MAX, write_setting
from trinamo.transports.etcd import open_etcd

pytestmark = [
    pytest.mark.slow,
    pytest.mark.services,
    # The client leaves a generator to the garbage collector when a stream is left early.
    pytest.mark.filterwarnings("ignore:.*(httpx|httpcore|Response.aiter).*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
OK = 200


async def ask(cluster: Cluster, **more: Any) -> int:
    body = chat("hello", **more)
    answer = await cluster.client.post(f"{cluster.url}/v1/chat/completions", json=body)
    return answer.status_code


def urls(cluster: Cluster) -> list[str]:
    return [cluster.url, *(worker.facts["status_url"] for worker in cluster.workers)]


async def wait_metric(cluster: Cluster, name: str, value: float, **labels: str) -> None:
    """Until every process of the cluster shows this value."""

    async def is_reached() -> bool:
        found = [await cluster.metric(url, name, **labels) for url in urls(cluster)]
        return found == [value] * len(found)

    await until(is_reached, f"{name} is {value:g} everywhere")


async def wait_plane(cluster: Cluster, plane: str, *, connected: bool) -> None:
    """As `wait_metric` for `…_connected`, but `/metrics` may be a second old and this is not."""

    async def is_reached() -> bool:
        answer = await cluster.client.get(f"{cluster.url}/status")
        found = [answer.json()["cluster"][plane]["is_connected"]]
        for worker in cluster.workers:
            health = await cluster.client.get(f"{worker.facts['status_url']}/health")
            found.append(health.json()[f"{plane}_connected"])
        return found == [connected] * len(found)

    await until(is_reached, f"{plane} is {'' if connected else 'not '}connected everywhere")


def addresses(cluster: Cluster) -> dict[str, str]:
    """Where the commands find the servers: over the same links as the processes."""
    return {"etcd": cluster.links["etcd"].address, "nats": cluster.links["nats"].address}


async def look(cluster: Cluster) -> Survey:
    """What `trinamo status` finds."""
    where = addresses(cluster)
    overrides = {
        "control_plane.etcd.endpoints": where["etcd"],
        "event_plane.nats.servers": f"nats://{where['nats']}",
        "event_plane.nats.token": cluster.nats.token,
    }
    target = Target(load_config(environ={}, overrides=overrides), None, is_named=True)
    return await survey_cluster(target, url=cluster.url)


async def status(cluster: Cluster, *options: str) -> subprocess.CompletedProcess[bytes]:
    """`trinamo status` itself."""
    where = addresses(cluster)
    command = [*COMMAND, "status", "--etcd", where["etcd"], "--nats", f"nats://{where['nats']}"]
    return await trio.run_process(
        [*command, "--url", cluster.url, *options],
        capture_stdout=True,
        capture_stderr=True,
        check=False,
        env={**os.environ, "TRINAMO_EVENT_PLANE__NATS__TOKEN": cluster.nats.token},
    )


async def is_whole(cluster: Cluster) -> bool:
    return not (await look(cluster)).away


def seen(survey: Survey) -> tuple[set[str], list[tuple[str, int]]]:
    """The instances and models in a survey."""
    return {each.id for each in survey.instances}, [(m.name, m.instances) for m in survey.models]


async def set_while_running(cluster: Cluster) -> None:
    """A value reaches every process; nonsense is refused by every one, and the value kept."""
    setting = REQUESTS_MAX
    async with open_etcd(cluster.etcd.address) as control:
        await write_setting(control, setting.name, "64")
        await wait_metric(cluster, "setting_value", 64, setting=setting.name)
        await control.put(setting.key, b'"lots"')
        await wait_metric(cluster, "settings_refused_total", 1, setting=setting.name)
    await wait_metric(cluster, "setting_value", 64, setting=setting.name)


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
        ids = {worker.facts["instance_id"] for worker in cluster.workers}
        answers = [await ask(cluster)]
        await wait_metric(cluster, "control_plane_connected", 1)
        whole = await look(cluster)
        await set_while_running(cluster)

        cluster.etcd.freeze()
        await wait_plane(cluster, "control", connected=False)
        answers += [await ask(cluster) for _ in range(3)]
        cluster.etcd.thaw()
        await wait_plane(cluster, "control", connected=True)

        await cluster.links["etcd"].cut()
        await wait_metric(cluster, "control_plane_connected", 0)
        told = await status(cluster, "--json")
        answers += [await ask(cluster) for _ in range(3)]
        await cluster.links["etcd"].mend()
        await wait_plane(cluster, "control", connected=True)
        before = [await incarnation(worker) for worker in cluster.workers]

        await cluster.etcd.kill()
        shutil.rmtree(cluster.etcd.log_path.parent / "data")
        await cluster.etcd.start()

        async def all_again() -> bool:
            now = [await incarnation(worker) for worker in cluster.workers]
            return all(n > b for n, b in zip(now, before, strict=True))

        await until(all_again, "every worker registered under a new lease")
        await wait_registered(cluster)
        await cluster.wait_live(2)
        await cluster.wait_models()
        answers += [await ask(cluster) for _ in range(3)]

        async def resynced() -> bool:
            return await cluster.metric(cluster.url, "control_plane_resyncs_total") >= 1

        await until(resynced, "the frontend has read everything again")
        await wait_metric(cluster, "control_plane_connected", 1)
        await until(lambda: is_whole(cluster), "the status has nothing to complain about")
        healed = await look(cluster)
        still = [m.pid for m in [cluster.frontend, *cluster.workers] if m.is_running]

    assert answers == [OK] * 10
    assert still == pids
    assert seen(whole) == seen(healed) == (ids, [("echo", 2)])
    assert whole.away == []
    assert told.returncode == EXIT_DEGRADED, told.stderr
    last = json.loads(told.stdout)
    assert last["is_last_known"]
    assert "does not answer; this is what the frontend last knew" in last["away"][0]
    assert not last["frontend"]["control"]["is_connected"]
    assert {each["id"] for each in last["instances"]} == ids
    assert {each["seen"] for each in last["instances"]} == {"live"}
    assert [(each["name"], each["instances"]) for each in last["models"]] == [("echo", 2)]


async def test_nats_frozen_cut_off_and_restarted_stops_no_request(tmp_path: Path) -> None:
    settings = {"event_plane.nats.ping_interval_s": 0.5, "event_plane.nats.connect_timeout_s": 0.5}
    async with open_cluster(tmp_path, settings=settings, linked=True) as cluster:
        answers = [await ask(cluster)]
        await wait_metric(cluster, "event_plane_connected", 1)

        cluster.nats.freeze()
        await wait_plane(cluster, "events", connected=False)
        answers += [await ask(cluster) for _ in range(3)]
        cluster.nats.thaw()
        await wait_plane(cluster, "events", connected=True)

        whole = await look(cluster)
        await cluster.links["nats"].cut()
        await wait_metric(cluster, "event_plane_connected", 0)
        told = await status(cluster)
        answers += [await ask(cluster) for _ in range(3)]
        await cluster.links["nats"].mend()
        await wait_plane(cluster, "events", connected=True)

        await cluster.nats.restart()

        async def all_again() -> bool:
            name = "event_plane_connections_total"
            return min([await cluster.metric(url, name) for url in urls(cluster)]) >= 3

        await until(all_again, "every process has made a connection after each break")
        await wait_metric(cluster, "event_plane_connected", 1)
        answers += [await ask(cluster) for _ in range(3)]
        dropped = await cluster.metric(cluster.url, "event_plane_dropped_messages_total")
        await until(lambda: is_whole(cluster), "the status has nothing to complain about")

    assert answers == [OK] * 10
    assert whole.away == []
    assert told.returncode == EXIT_DEGRADED, told.stderr
    assert b"does not answer the frontend" in told.stdout
    assert b"not connected to NATS" in told.stdout
    assert b"2 of 2 instances have no connection to NATS" in told.stdout
    assert dropped == 0


async def test_requests_over_nats_go_over_tcp_while_it_is_away(tmp_path: Path) -> None:
    settings = {"data_plane.requests": "nats", "event_plane.nats.ack_timeout_s": 1}
    async with open_cluster(tmp_path, settings=settings) as cluster:
        before = await ask(cluster)
        await cluster.nats.kill()
        await wait_metric(cluster, "event_plane_connected", 0)
        away = [await ask(cluster) for _ in range(4)]
        await cluster.nats.start()
        await wait_metric(cluster, "event_plane_connected", 1)
        after = await ask(cluster)

    assert (before, away, after) == (OK, [OK] * 4, OK)


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
        "control_plane.etcd.lease_ttl_s": 2,
        "control_plane.etcd.silence_s": 1,
        "control_plane.etcd.request_timeout_s": 2,
        "data_plane.tcp.ack_timeout_s": 1,
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
        async with httpx.AsyncClient(trust_env=False) as client:
            health = (await client.get(f"{frozen.facts['status_url']}/health")).json()

        left = cluster.frontend.log.read_text().count(" left ")
        answers += await freeze_past_the_leases(cluster, settings["control_plane.etcd.lease_ttl_s"])
        told = cluster.frontend.log.read_text()

    assert told.count(" left ") == left == 1
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


async def test_a_frozen_worker_s_stream_ends_while_etcd_is_frozen_too(tmp_path: Path) -> None:
    """Nobody deletes it: it is asked, and answers nobody. The other worker serves on."""
    settings = {
        "router.silence_grace_s": 1,
        "control_plane.etcd.silence_s": 1,
        "control_plane.etcd.request_timeout_s": 2,
        "data_plane.tcp.ack_timeout_s": 1,
    }
    async with open_cluster(tmp_path, engine="exact", settings=settings) as cluster:
        frozen, other = cluster.workers
        # Round robin: one stream on each worker.
        async with long_stream(cluster) as first, long_stream(cluster) as second:
            cluster.etcd.freeze()
            frozen.freeze()
            with trio.fail_after(30):
                ends = [
                    [line async for line in first if line][-1],
                    [line async for line in second if line][-1],
                ]
        answers = [await ask(cluster, max_tokens=2) for _ in range(6)]
        found = {
            reason: await cluster.metric(cluster.url, "silent_requests_total", reason=reason)
            for reason in ("left", "unanswered", "replaced")
        }
        live = await cluster.metric(cluster.url, "live_instances")
        frozen.thaw()

        async def is_idle() -> bool:
            url = frozen.facts["status_url"]
            return await cluster.metric(url, "worker_requests_in_flight") == 0

        await until(is_idle, "the worker that woke has heard Kill")
        served = await cluster.metric(other.facts["status_url"], "worker_requests_total")
        cluster.etcd.thaw()
        told = cluster.frontend.log.read_text()

    (error,) = (json.loads(end.removeprefix("data: ")) for end in ends if "[DONE]" not in end)
    assert error["error"]["code"] == "disconnected"
    assert "does not answer" in error["error"]["message"]
    assert found == {"left": 0, "unanswered": 1, "replaced": 0}
    assert answers == [OK] * 6
    assert served >= 1
    assert live == 2
    assert " left " not in told


async def kill_under_a_stream(cluster: Cluster) -> None:
    async with long_stream(cluster) as lines:
        status_url = cluster.workers[0].facts["status_url"]
        assert await cluster.metric(status_url, "worker_requests_in_flight") == 1
        cluster.frontend.kill()
        async for _ in lines:
            pass


async def test_a_frozen_frontend_costs_time_only_and_a_killed_one_frees_everything(
    tmp_path: Path,
) -> None:
    async with open_cluster(tmp_path, workers=1, engine="exact") as cluster:
        async with long_stream(cluster) as lines:
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

        await until(is_free, "the worker serves nobody", timeout_s=5)
        cancelled = await cluster.metric(status_url, "worker_cancellations_total")
        granted = await cluster.metric(status_url, "lease_state", state="granted")

    assert rest[-1] == "data: [DONE]"
    assert len(rest) > 400
    assert answer == OK
    assert cancelled == 1
    assert granted == 1
