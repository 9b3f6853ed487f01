"""A process keeps its keys, whoever deletes or overwrites them; on every store."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import trio

from tests.conformance.control.backends import Backend, MemoryBackend
from tests.conformance.control.etcd_members import EtcdBackend
from tests.conformance.simulated import SimulatedEtcdBackend
from tests.worlds import in_world
from trinamo.runtime.env import RealEnv
from trinamo.runtime.planes import ControlPlane
from trinamo.runtime.worker.metrics import WorkerMetrics
from trinamo.runtime.worker.registration import Registrar

_numbers = itertools.count(1)


@pytest.fixture(params=["memory", "simulated", "etcd"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "memory":
        yield MemoryBackend()
    elif request.param == "simulated":
        simulated = SimulatedEtcdBackend()
        with in_world(simulated.world):
            yield simulated
    else:
        yield EtcdBackend(request.getfixturevalue("etcd_server").endpoint)


class SeededEnv(RealEnv):
    """Real, but for its dice, which a world of the simulator forbids."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(1)


async def wait_value(plane: ControlPlane, key: str, value: bytes) -> None:
    with trio.fail_after(120):
        while (held := await plane.get(key)) is None or held.value != value:
            await trio.sleep(0.02)


async def test_keys_that_strangers_delete_or_overwrite_come_back(backend: Backend) -> None:
    """Many times, so that what the watch tells races with what the writes answer."""
    prefix = f"own-{next(_numbers)}/"
    keys = [f"{prefix}a", f"{prefix}a/b", f"{prefix}c"]
    metrics = WorkerMetrics(RealEnv())
    async with (
        backend.open_plane() as mine,
        backend.open_plane() as others,
        trio.open_nursery() as nursery,
    ):
        registrar = Registrar(mine, SeededEnv(), metrics=metrics)
        await nursery.start(registrar.run)
        for key in keys:
            await registrar.register(key, lambda incarnation: b"%d" % incarnation)
        for _ in range(3):
            await others.delete_prefix(prefix)
            await others.put(keys[0], b"a stranger's")
            for key in keys:
                await wait_value(others, key, b"1")
        lease = await others.grant_lease(60)
        await others.put(keys[0], b"another process's", lease_id=lease.id)
        await trio.sleep(0.5)
        held = await others.get(keys[0])
        assert held is not None
        assert held.value == b"another process's"
        await others.revoke_lease(lease.id)
        await wait_value(others, keys[0], b"1")
        assert registrar.state.lost_count == 0
        assert metrics.value("registrations_restored_total") >= 3 * len(keys)
        await registrar.revoke()
        assert not (await others.range(prefix)).entries
        nursery.cancel_scope.cancel()
