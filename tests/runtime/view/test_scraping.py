"""`/sd` lists every status port of a cluster, and nothing that is none."""

from __future__ import annotations

import pytest
import trio

from tests.runtime.one_process import OneProcess
from tests.runtime.small_cluster import SmallCluster, open_small_cluster
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import ConnectError, UnavailableError
from trinamo.runtime.planes import Snapshot
from trinamo.runtime.planes.transports import DataPlane
from trinamo.runtime.protocol.discovery.instances import (
    FrontendEntry,
    Instance,
    encode_frontend,
    encode_instance,
)
from trinamo.runtime.view.scraping import READ_INTERVAL_S, TARGETS_MAX, ScrapeTargets
from trinamo.transports.memory.control import MemoryControlPlane

ENDPOINT = "a/b/c"


async def listed(cluster: SmallCluster) -> list[dict[str, object]]:
    response = await cluster.http.get("/sd")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    found: list[dict[str, object]] = response.json()
    return found


async def test_every_process_of_a_cluster_is_a_target_that_answers_with_its_metrics() -> None:
    async with open_small_cluster(workers=2) as cluster:
        with trio.fail_after(120):
            while len(groups := await listed(cluster)) < 3:
                await trio.sleep(0.05)
        for group in groups:
            assert isinstance(group["targets"], list)
            [address] = group["targets"]
            page = await cluster.http.get(f"http://{address}/metrics")
            assert "trinamo_build_info" in page.text

    labels = [group["labels"] for group in groups]
    assert [each["__meta_trinamo_role"] for each in labels] == ["worker", "worker", "frontend"]  # type: ignore[index]
    ids = {each["__meta_trinamo_instance_id"] for each in labels}  # type: ignore[index]
    assert ids >= {worker.instance_id for worker in cluster.workers}
    assert labels[0]["__meta_trinamo_model"] == "small"  # type: ignore[index]


async def test_a_frontend_leaves_no_entry_behind() -> None:
    async with open_small_cluster() as cluster:
        control = MemoryControlPlane(cluster.transports.store)
        with trio.fail_after(120):
            while not (await control.range("frontends/")).entries:
                await trio.sleep(0.01)
    assert (await control.range("frontends/")).entries == ()


async def test_a_frontend_without_a_status_port_is_listed_where_it_was_asked() -> None:
    async with open_small_cluster(http__status_port="null") as cluster:
        groups = await listed(cluster)
        own = f"127.0.0.1:{cluster.http.base_url.port}"

    assert [group["targets"] for group in groups][-1] == [own]


async def put(control: MemoryControlPlane, instance_id: str, status: str, **tcp: str) -> None:
    each = Instance(
        endpoint=ENDPOINT, id=instance_id, transports=tcp, metadata={"status": status, "model": "m"}
    )
    await control.put(each.key, encode_instance(each))


async def targets(control: MemoryControlPlane) -> list[str]:
    groups = await ScrapeTargets(control, RealEnv().clock).groups("front:1")
    return [group.targets[0] for group in groups]


@pytest.mark.parametrize(
    ("bound", "home", "told"),
    [
        ("http://0.0.0.0:8788", "10.0.0.7:4711", "http://10.0.0.7:8788"),
        ("https://[::]:8788", "[fd00::1]:4711", "https://[fd00::1]:8788"),
        ("http://0.0.0.0:8788", "gpu-7:4711", "http://gpu-7:8788"),
        ("http://10.0.0.9:8788", "10.0.0.7:4711", "http://10.0.0.9:8788"),
        ("http://127.0.0.1:8788", "127.0.0.1:4711", "http://127.0.0.1:8788"),
        ("http://127.0.0.1:8788", "", "http://127.0.0.1:8788"),
        ("http://[::1]:8788", "gpu-7:4711", ""),
        ("http://localhost:8788", "10.0.0.7:4711", ""),
        ("http://0.0.0.0:8788", "", ""),
    ],
)
def test_a_port_is_told_as_others_ask_it_or_not_at_all(bound: str, home: str, told: str) -> None:
    """One that is bound everywhere is where peers dial the process; loopback is no other machine's."""
    assert DataPlane(home_address=home).advertised_url(bound) == told


async def test_what_makes_no_sense_is_left_out() -> None:
    control = MemoryControlPlane(OneProcess().store)
    await put(control, "1", "http://ok:1")
    await put(control, "2", "")
    await put(control, "3", "http://bad host\n:1")
    await put(control, "4", "http://x:99999")
    await put(control, "5", "file:///etc/passwd")
    await put(control, "8", "http://0.0.0.0:8788", tcp="10.0.0.7:4711")
    await control.put("instances/a/b/c/6", b"nonsense")
    await control.put("frontends/7", b"nonsense")
    entry = FrontendEntry(id="0" * 16, url="", status="http://status:2")
    await control.put("frontends/" + "1" * 16, encode_frontend(entry))

    assert await targets(control) == ["ok:1", "front:1"]


async def test_several_endpoints_of_a_process_are_one_target_with_all_their_models() -> None:
    control = MemoryControlPlane(OneProcess().store)
    for endpoint, model in (("a/b/c", "x"), ("a/b/d", "y")):
        each = Instance(
            endpoint=endpoint,
            id="1",
            transports={},
            metadata={"status": "http://w:1", "model": model, "role": "decode"},
        )
        await control.put(each.key, encode_instance(each))

    [worker, _] = await ScrapeTargets(control, RealEnv().clock).groups("front:1")

    assert worker.labels["__meta_trinamo_model"] == "x,y"
    assert worker.labels["__meta_trinamo_role"] == "decode"


async def test_the_list_has_a_bound() -> None:
    control = MemoryControlPlane(OneProcess().store)
    for number in range(TARGETS_MAX + 5):
        await put(control, f"{number:x}", f"http://w{number}:1")

    assert len(await targets(control)) == TARGETS_MAX


class Counted(MemoryControlPlane):
    """Counts what is read, and may be away."""

    reads = 0
    is_away = False

    async def range(self, prefix: str) -> Snapshot:
        self.reads += 1
        if self.is_away:
            raise ConnectError("etcd is away")
        return await super().range(prefix)


async def test_however_many_ask_the_store_is_read_seldom(autojump_clock: object) -> None:
    control = Counted(OneProcess().store)
    found = ScrapeTargets(control, RealEnv().clock)

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(found.groups, "front:1")
    assert control.reads == 3
    await trio.sleep(READ_INTERVAL_S)
    await found.groups("front:1")
    assert control.reads == 6


async def test_while_the_store_is_away_the_last_list_holds_and_none_is_an_error(
    autojump_clock: object,
) -> None:
    control = Counted(OneProcess().store)
    control.is_away = True
    found = ScrapeTargets(control, RealEnv().clock)
    with pytest.raises(UnavailableError):
        await found.groups("front:1")

    control.is_away = False
    await put(control, "1", "http://w:1")
    await trio.sleep(READ_INTERVAL_S)
    assert len(await found.groups("front:1")) == 2
    control.is_away = True
    await trio.sleep(READ_INTERVAL_S)
    assert len(await found.groups("front:1")) == 2
