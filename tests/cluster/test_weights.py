"""A worker without the model's file takes it from real peers, through kills on both sides."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from tests import needs
from tests.cluster.processes import PATIENT, Cluster, Member, chat, open_cluster, start, until
from trinamo.cli.doctor.discovery import discovery_findings
from trinamo.cli.running.locating import Target
from trinamo.cli.status.asking import survey_cluster
from trinamo.runtime.config.config import load_config
from trinamo.runtime.engines.llamacpp.model_file import (
    FILE_BYTES,
    FILE_NAME,
    find_model,
    missing_model,
)
from trinamo.runtime.view.facts import weights_rows

needs.LLAMACPP.imported()
if missing_model() is not None:
    needs.A_MODEL.lacking()
SLOW: dict[str, Any] = {"weights.bytes_per_second_max": 10_000_000}
CHUNK_BYTES = 4 << 20
QUICK_LEASE = {"control_plane.etcd.lease_ttl_s": 10}


@attrs.define
class Site:
    """A cluster, and machines with caches of their own beside it."""

    cluster: Cluster
    folder: Path
    stack: AsyncExitStack
    count: int = 0

    def cache(self, name: str) -> Path:
        return self.folder / name / "trinamo" / "models"

    async def worker(self, cache: str, **settings: Any) -> Member:
        """One worker of llamacpp with the files of this cache."""
        common = {
            **PATIENT,
            "control_plane.etcd.endpoints": self.cluster.etcd.endpoint,
            "event_plane.nats.servers": self.cluster.nats.url,
            "event_plane.nats.token": self.cluster.nats.token,
            "worker.engine": "llamacpp",
            "worker.threads": 1,
        }
        given = {key.replace("__", "."): value for key, value in settings.items()}
        self.count += 1
        log = self.folder / f"{cache}-{self.count}.log"
        launcher = ["env", f"XDG_CACHE_HOME={self.folder / cache}"]
        member = await start("worker", {**common, **given}, log, launcher=launcher)
        self.stack.push_async_callback(end, member)
        return member

    async def holder(self, cache: str, *, data: Path | None = None, **settings: Any) -> Member:
        """A worker that has the file, once its peers can find it."""
        place = self.cache(cache)
        place.mkdir(parents=True, exist_ok=True)
        if data is None:
            os.link(find_model(), place / FILE_NAME)
        else:
            shutil.copyfile(data, place / FILE_NAME)
        member = await self.worker(cache, **settings)
        await until(lambda: self.does_offer(member), "the weights are offered")
        return member

    async def does_offer(self, member: Member) -> bool:
        health = await self.health(member)
        log = member.log.read_text()
        return bool(health["weights"]["held"]) and "are offered to peers" in log

    async def health(self, member: Member) -> dict[str, Any]:
        url = str(member.facts["status_url"])
        found: dict[str, Any] = (await self.cluster.client.get(f"{url}/health")).json()
        return found

    async def metric(self, member: Member, name: str, **labels: str) -> float:
        return await self.cluster.metric(str(member.facts["status_url"]), name, **labels)

    def part_bytes(self, cache: str) -> int:
        """How much of the file a taker has on its disk."""
        return sum(each.stat().st_size for each in self.cache(cache).glob(".*.part"))

    async def wait_part(self, cache: str, byte_count: int) -> None:
        async def is_there() -> bool:
            return self.part_bytes(cache) >= byte_count

        await until(is_there, f"{byte_count} bytes are there")


async def end(member: Member) -> None:
    await member.stop()
    assert member.process.stdout is not None
    await member.process.stdout.aclose()


@asynccontextmanager
async def open_site(folder: Path) -> AsyncIterator[Site]:
    async with (
        open_cluster(folder, workers=0, settings=QUICK_LEASE) as cluster,
        AsyncExitStack() as stack,
    ):
        yield Site(cluster, folder, stack)


async def answer_of(cluster: Cluster, worker: Member) -> str:
    response = await cluster.client.post(
        f"{cluster.url}/v1/chat/completions",
        json=chat("Name a colour.", max_tokens=8, temperature=0),
        headers={"X-Trinamo-Worker": str(worker.facts["instance_id"])},
    )
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


async def test_a_worker_without_the_file_takes_it_and_answers_as_its_peer_does(
    tmp_path: Path,
) -> None:
    """And holds it from then on, as `trinamo status` and `trinamo doctor` say."""
    async with open_site(tmp_path) as site:
        first = await site.holder("first")
        second = await site.worker("second")
        await site.cluster.wait_models()
        await site.cluster.wait_live(2)
        assert await answer_of(site.cluster, second) == await answer_of(site.cluster, first)
        assert [each.name for each in site.cache("second").iterdir()] == [FILE_NAME]
        assert await site.metric(second, "weights_bytes_total", direction="taken") == FILE_BYTES
        assert await site.metric(first, "weights_bytes_total", direction="lent") == FILE_BYTES
        assert await site.metric(second, "weights_fetch_seconds") > 0
        await until(lambda: site.does_offer(second), "the second offers it too")
        overrides = {"control_plane.etcd.endpoints": site.cluster.etcd.endpoint}
        target = Target(load_config(environ={}, overrides=overrides), None, is_named=True)
        survey = await survey_cluster(target, timeout_s=60)
        rows = list(weights_rows((each.id, each.health) for each in survey.instances))
        assert len(rows) == 2

        async def is_found() -> bool:
            found = await discovery_findings(target)
            told = [each.text for each in found if each.what == "weights"]
            return len(told) == 1 and "is held by 2 workers" in told[0]

        await until(is_found, "the doctor finds both")


@pytest.mark.parametrize(
    "settings",
    [
        {"data_plane.nixl.enabled": True},
        {"data_plane.mooncake.enabled": True, "data_plane.mooncake.protocol": "tcp"},
    ],
    ids=["nixl", "mooncake"],
)
async def test_the_file_comes_over_the_chain_of_backends(
    settings: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    needs.needs_library_of(request.node.callspec.id)
    async with open_site(tmp_path) as site:
        await site.holder("first", **settings)
        second = await site.worker("second", **settings)
        assert await site.metric(second, "weights_bytes_total", direction="taken") == FILE_BYTES


async def test_a_taker_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site, trio.open_nursery() as nursery:
        first = await site.holder("first", **SLOW)

        async def be_killed() -> None:
            with pytest.raises(AssertionError, match="did not start"):
                await site.worker("second")

        nursery.start_soon(be_killed)
        await site.wait_part("second", 10_000_000)
        (lent,) = (await site.health(first))["weights"]["lent"]
        assert 0 < lent["done"] < lent["count"]
        os.kill(int(lent["taker"].rpartition(" ")[2]), 9)
        taken_before = site.part_bytes("second")

        async def is_forgotten() -> bool:
            return not (await site.health(first))["weights"]["lent"]

        await until(is_forgotten, "the holder has taken back what it lent")
        second = await site.worker("second")
        taken = await site.metric(second, "weights_bytes_total", direction="taken")
        assert (
            FILE_BYTES - taken_before - CHUNK_BYTES
            <= taken
            <= FILE_BYTES - taken_before + CHUNK_BYTES
        )
        await site.cluster.wait_models()
        assert await answer_of(site.cluster, second)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "told to leave"])
async def test_when_a_holder_goes_another_goes_on(
    is_killed: bool,
    tmp_path: Path,
) -> None:
    async with open_site(tmp_path) as site, trio.open_nursery() as nursery:
        holders = [await site.holder(name, **SLOW) for name in ("first", "second")]
        started: list[Member] = []

        async def take() -> None:
            started.append(await site.worker("third"))

        nursery.start_soon(take)
        await site.wait_part("third", 10_000_000)
        lending = [each for each in holders if (await site.health(each))["weights"]["lent"]]
        assert len(lending) == 1
        if is_killed:
            lending[0].kill()
        else:
            assert await lending[0].stop() == 0
            # It did not wait until the whole file was lent.
            assert not started

        async def is_started() -> bool:
            return bool(started)

        await until(is_started, "the third serves", timeout_s=300)
        taken = await site.metric(started[0], "weights_bytes_total", direction="taken")
        failures = await site.metric(started[0], "weights_failures_total")
        assert (taken, failures >= 1) == (FILE_BYTES, True)


async def test_a_chunk_that_is_wrong_is_refused_and_taken_elsewhere(tmp_path: Path) -> None:
    """A holder's file that is damaged after its digests were made."""
    async with open_site(tmp_path) as site:
        first = await site.holder("first", data=find_model())
        with (site.cache("first") / FILE_NAME).open("r+b") as file:
            file.seek(70_000_000)
            byte = file.read(1)
            file.seek(70_000_000)
            file.write(bytes([byte[0] ^ 1]))
        with pytest.raises(AssertionError, match="did not start"):
            await site.worker("second", weights__patience_s=3)
        assert "nobody lends what" in (tmp_path / "second-2.log").read_text()
        assert first.is_running
        await site.holder("third")
        second = await site.worker("second")
        taken = await site.metric(second, "weights_bytes_total", direction="taken")
        assert taken <= FILE_BYTES - 64_000_000
        assert (site.cache("second") / FILE_NAME).stat().st_size == FILE_BYTES


async def test_nobody_who_has_the_file_is_said_and_auto_does_without(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        with pytest.raises(AssertionError, match="did not start"):
            await site.worker("second", weights__patience_s=1)
        exact = await site.worker("second", worker__engine="auto")
        assert exact.facts["engine"] == "exact"
