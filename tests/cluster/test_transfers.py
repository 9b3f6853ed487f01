"""KV blocks between real processes, found through a real etcd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.cluster.processes import PATIENT, ROLE, Member, start, until
from tests.runtime.kv.ranges import memory_of
from trinamo.cli.running.locating import Target
from trinamo.cli.status.asking import survey_cluster
from trinamo.runtime.config.config import load_config
from trinamo.runtime.engines.exact.engine import open_exact_engine
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import MetadataNotFoundError, StaleMemoryError
from trinamo.runtime.process.opening import open_runtime
from trinamo.transports.assembly.planes import RealTransports
from trinamo.transports.servers import open_etcd_server

KV_OWNER = Path(__file__).with_name("kv_owner.py")


async def test_a_worker_reads_granted_blocks_of_another_and_forgets_it_when_it_is_killed(
    tmp_path: Path,
) -> None:
    async with open_etcd_server() as etcd:
        settings: dict[str, Any] = {
            **PATIENT,
            "control_plane.etcd.endpoints": etcd.endpoint,
            "control_plane.etcd.lease_ttl_s": 10,
            "event_plane.backend": "memory",
            "worker.engine": "exact",
        }
        config = load_config(environ={}, overrides=settings)
        members: list[Member] = []

        async def begin(role: str, script: Path) -> None:
            log = tmp_path / f"{role}.log"
            members.append(await start(role, settings, log, script=script))

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(begin, "worker", ROLE)
                nursery.start_soon(begin, "kv", KV_OWNER)
            worker, owner = sorted(members, key=lambda each: "ticket" in each.facts)
            facts = owner.facts
            async with (
                open_exact_engine(block_count=128) as engine,
                open_runtime(
                    config, RealEnv(), RealTransports(), serving=True, kv=engine.kv
                ) as runtime,
            ):
                transfers = runtime.transfers
                assert transfers is not None
                assert engine.kv is not None
                ours = engine.kv.pool.take(len(facts["blocks"]))
                assert ours is not None
                with pytest.raises(StaleMemoryError):
                    await transfers.read(facts["engine_id"], ours, facts["blocks"], ticket=0)
                reports = await transfers.read(
                    facts["engine_id"], ours, facts["blocks"], ticket=facts["ticket"]
                )
                assert [report.backend for report in reports] == ["tcp"]
                assert (memory_of(engine.kv).view[:, :, ours] == facts["value"]).all()
                # A worker as operators start it offers its memory, for tickets only.
                with pytest.raises(StaleMemoryError):
                    await transfers.read(worker.facts["instance_id"], ours, [0, 1, 2], ticket=1)
                assert transfers.statistics().peers == 2

                owner.kill()

                async def is_forgotten() -> bool:
                    return transfers.statistics().peers == 1

                await until(is_forgotten, "the killed engine is forgotten")
                with pytest.raises(MetadataNotFoundError):
                    await transfers.read(
                        facts["engine_id"], ours, facts["blocks"], ticket=facts["ticket"]
                    )
                target = Target(config, None, is_named=True)
                survey = await survey_cluster(target, timeout_s=60)
                (seen,) = [
                    each for each in survey.instances if each.id == worker.facts["instance_id"]
                ]
                async with httpx.AsyncClient(timeout=120) as client:
                    page = (await client.get(f"{worker.facts['status_url']}/metrics")).text
            assert await worker.stop() == 0
        finally:
            for member in members:
                if member.is_running:
                    member.kill()
                await member.process.wait()
                assert member.process.stdout is not None
                await member.process.stdout.aclose()

    assert seen.health is not None
    (tcp,) = seen.health["transfers"]["chain"]
    assert (tcp["backend"], tcp["is_open"], tcp["problem"]) == ("tcp", True, "")
    assert seen.health["transfers"]["quarantined_blocks"] == 0
    assert 'trinamo_transfer_backend_open{backend="tcp"} 1.0' in page
    assert "shutdown: drain transfers took" in (tmp_path / "worker.log").read_text("utf-8")
