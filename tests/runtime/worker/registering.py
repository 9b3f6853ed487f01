"""A registrar that runs beside its store, for tests."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio
import trio.testing

from trinamo.runtime.env import RealEnv
from trinamo.runtime.worker.metrics import WorkerMetrics
from trinamo.runtime.worker.registration import LeaseFacts, Registrar
from trinamo.transports.memory.control import ControlFaults, MemoryControlPlane

TTL_S = 10.0


class SeededEnv(RealEnv):
    """The dice always fall alike."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(7)


def render(incarnation: int) -> bytes:
    return b"incarnation %d" % incarnation


@attrs.frozen
class Registered:
    """A registrar that runs, its link to the store, and the store as others see it."""

    metrics: WorkerMetrics

    registrar: Registrar
    faults: ControlFaults
    others: MemoryControlPlane
    changes: list[LeaseFacts]

    async def value(self, key: str = "k") -> bytes | None:
        entry = await self.others.get(key)
        return None if entry is None else entry.value

    async def wait_value(self, value: bytes | None, key: str = "k") -> None:
        with trio.fail_after(120):
            while await self.value(key) != value:
                await trio.sleep(0.05)


@asynccontextmanager
async def running() -> AsyncIterator[Registered]:
    faults, changes = ControlFaults(), list[LeaseFacts]()
    metrics = WorkerMetrics(RealEnv())
    mine = MemoryControlPlane(faults=faults)
    registrar = Registrar(
        mine,
        SeededEnv(),
        ttl_s=TTL_S,
        on_change=lambda s: changes.append(attrs.evolve(s)),
        metrics=metrics,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(registrar.run)
        yield Registered(metrics, registrar, faults, MemoryControlPlane(mine.store), changes)
        nursery.cancel_scope.cancel()
