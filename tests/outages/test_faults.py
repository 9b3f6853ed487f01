"""The faults of the design's table against a real cluster of processes, one after the other.

Killed servers and a killed worker are in `tests/cluster`; here are servers that hang, that are cut
off, that forgot everything, a worker that hangs, and a frontend that dies or hangs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from tests.cli.places import COMMAND
from tests.cluster.processes import Cluster, open_cluster, until
from tests.outages.watching import OK, ask, incarnation, wait_registered
from trinamo.cli.failures import EXIT_DEGRADED
from trinamo.cli.running.locating import Target
from trinamo.cli.status.asking import survey_cluster
from trinamo.runtime.config.config import load_config
from trinamo.runtime.config.planes import EtcdConfig
from trinamo.runtime.process.settings import REQUESTS_MAX, write_setting
from trinamo.runtime.view.survey import Survey
from trinamo.transports.etcd import open_etcd

pytestmark = [
    # The client leaves a generator to the garbage collector when a stream is left early.
    pytest.mark.filterwarnings("ignore:.*(httpx|httpcore|Response.aiter).*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


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
        "control_plane.etcd.connect_timeout_s": 60,
        "event_plane.nats.servers": f"nats://{where['nats']}",
        "event_plane.nats.token": cluster.nats.token,
    }
    target = Target(load_config(environ={}, overrides=overrides), None, is_named=True)
    return await survey_cluster(target, url=cluster.url, timeout_s=60)


async def status(cluster: Cluster, *options: str) -> subprocess.CompletedProcess[bytes]:
    """`trinamo status` itself, which gives each process a minute to answer."""
    where = addresses(cluster)
    command = [*COMMAND, "status", "--etcd", where["etcd"], "--nats", f"nats://{where['nats']}"]
    return await trio.run_process(
        [*command, "--url", cluster.url, "--timeout", "60", *options],
        capture_stdout=True,
        capture_stderr=True,
        check=False,
        env={**os.environ, "TRINAMO_EVENT_PLANE__NATS__TOKEN": cluster.nats.token},
    )


async def status_with(
    cluster: Cluster, *words: bytes, options: Sequence[str] = ()
) -> subprocess.CompletedProcess[bytes]:
    """`trinamo status`, once all of these words are in it."""
    told: list[subprocess.CompletedProcess[bytes]] = []

    async def are_there() -> bool:
        told.append(await status(cluster, *options))
        return all(each in told[-1].stdout for each in words)

    await until(are_there, f"the status has {words}")
    return told[-1]


async def is_whole(cluster: Cluster) -> bool:
    return not (await look(cluster)).away


def seen(survey: Survey) -> tuple[set[str], list[tuple[str, int]]]:
    """The instances and models in a survey."""
    return {each.id for each in survey.instances}, [(m.name, m.instances) for m in survey.models]


async def set_while_running(cluster: Cluster) -> None:
    """A value reaches every process; nonsense is refused by every one, and the value kept."""
    setting = REQUESTS_MAX
    section = EtcdConfig(connect_timeout_s=60, request_timeout_s=60)
    async with open_etcd(cluster.etcd.address, section) as control:
        await write_setting(control, setting.name, "64")
        await wait_metric(cluster, "setting_value", 64, setting=setting.name)
        await control.put(setting.key, b'"lots"')
        await wait_metric(cluster, "settings_refused_total", 1, setting=setting.name)
    await wait_metric(cluster, "setting_value", 64, setting=setting.name)


async def test_etcd_frozen_cut_off_and_emptied_stops_no_request(tmp_path: Path) -> None:
    settings = {"control_plane.etcd.silence_s": 1, "control_plane.etcd.request_timeout_s": 2}
    async with open_cluster(tmp_path, settings=settings, linked=True) as cluster:
        pids = [member.pid for member in [cluster.frontend, *cluster.workers]]
        ids = {worker.facts["instance_id"] for worker in cluster.workers}
        answers = [await ask(cluster)]
        await wait_metric(cluster, "control_plane_connected", 1)
        await until(lambda: is_whole(cluster), "the status has nothing to complain about")
        whole = await look(cluster)
        await set_while_running(cluster)

        cluster.etcd.freeze()
        await wait_plane(cluster, "control", connected=False)
        answers += [await ask(cluster) for _ in range(3)]
        cluster.etcd.thaw()
        await wait_plane(cluster, "control", connected=True)

        await cluster.links["etcd"].cut()
        await wait_metric(cluster, "control_plane_connected", 0)
        told = await status_with(
            cluster,
            b"does not answer; this is what the frontend last knew",
            options=["--json"],
        )
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

        await until(lambda: is_whole(cluster), "the status has nothing to complain about")
        whole = await look(cluster)
        await cluster.links["nats"].cut()
        await wait_metric(cluster, "event_plane_connected", 0)
        told = await status_with(
            cluster,
            b"does not answer the frontend",
            b"not connected to NATS",
            b"2 of 2 instances have no connection to NATS",
        )
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
    settings = {"data_plane.requests": "nats", "event_plane.nats.ack_timeout_s": 10}
    async with open_cluster(tmp_path, settings=settings) as cluster:
        before = await ask(cluster)
        await cluster.nats.kill()
        await wait_metric(cluster, "event_plane_connected", 0)
        away = [await ask(cluster) for _ in range(4)]
        await cluster.nats.start()
        await wait_metric(cluster, "event_plane_connected", 1)
        after = await ask(cluster)

    assert (before, away, after) == (OK, [OK] * 4, OK)
