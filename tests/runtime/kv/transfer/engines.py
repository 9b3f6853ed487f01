"""Two engines that can transfer: as processes over real TCP, or over memory planes that can be hurt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import numpy as np
import trio

from tests.runtime.kv.ranges import memory_of
from tests.runtime.one_process import OneProcess, config, open_process
from trinamo.runtime.env import RealEnv
from trinamo.runtime.kv.memory import KvLayout, KvMemory, KvShape, fingerprint
from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.kv.regions import KvCache
from trinamo.runtime.kv.transfer.engine import EngineTransfers, open_engine_transfers
from trinamo.runtime.kv.transfer.metrics import TransferMetrics
from trinamo.runtime.metrics.tallies import Registry
from trinamo.runtime.planes import TransferPlane
from trinamo.runtime.planes.transports import TransferChain
from trinamo.runtime.process.runtime import Runtime
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.memory.transfer import (
    MemoryMover,
    TransferFabric,
    open_memory_transfer_plane,
)

SHAPE = KvShape(layers=3, heads=1, channels=4, block_tokens=2, dtype="<i2")


def cache(
    seed: int,
    block_count: int = 8,
    layout: KvLayout = KvLayout.BLOCK_FIRST,
    model: str = "model",
) -> KvCache:
    """Memory of noise, all of whose blocks have an owner."""
    memory = KvMemory(SHAPE, block_count, layout)
    memory.view[:] = np.random.default_rng(seed).integers(-999, 999, memory.view.shape)
    pool = BlockPool(block_count)
    pool.take(block_count)
    return KvCache(
        memory=memory, pool=pool, fingerprint=fingerprint("test", "1", model, SHAPE, layout)
    )


def block(kv: KvCache, number: int) -> list[int]:
    """Everything in a block, whatever the layout."""
    return [int(each) for each in memory_of(kv).view[:, :, number].reshape(-1)]


def transfers_of(runtime: Runtime) -> EngineTransfers:
    assert runtime.transfers is not None
    return runtime.transfers


async def eventually(is_true: Callable[[], bool]) -> None:
    with trio.fail_after(120):
        while not is_true():
            await trio.sleep(0.005)


@attrs.define
class Pair:
    """Two workers of one process, over real TCP."""

    owner: Runtime
    reader: Runtime
    owned: KvCache
    read: KvCache

    @property
    def there(self) -> EngineTransfers:
        return transfers_of(self.owner)

    @property
    def here(self) -> EngineTransfers:
        return transfers_of(self.reader)


@asynccontextmanager
async def open_pair(
    transports: OneProcess, layout: KvLayout = KvLayout.BLOCK_FIRST, **overrides: Any
) -> AsyncIterator[Pair]:
    owned, read = cache(1, layout=layout), cache(2, 5, layout)
    async with (
        open_process(transports, serving=True, kv=owned, **overrides) as owner,
        open_process(transports, serving=True, kv=read, **overrides) as reader,
    ):
        yield Pair(owner, reader, owned, read)


class Unfenced:
    """A region whose owner cannot stop a peer, as with RDMA."""

    is_fenced = False

    def __init__(self, region: Any) -> None:
        self._region = region

    def __getattr__(self, name: str) -> Any:
        return getattr(self._region, name)


def is_unfenced(transfers: EngineTransfers, backend: str = "tcp") -> None:
    """From now on this engine's memory is as with RDMA."""
    unfenced: Any = Unfenced(transfers.memory.regions[backend])
    transfers.memory.regions[backend] = unfenced


@attrs.define
class Village:
    """Engines by name, over memory planes that can be hurt."""

    control: MemoryControlPlane = attrs.field(factory=MemoryControlPlane)
    fabric: TransferFabric = attrs.field(factory=TransferFabric)

    @asynccontextmanager
    async def live(
        self, engine_id: str, kv: KvCache
    ) -> AsyncIterator[tuple[EngineTransfers, TransferPlane[MemoryMover]]]:
        async with (
            open_memory_transfer_plane(self.fabric) as plane,
            open_engine_transfers(
                TransferChain(planes=[plane], order=[plane.backend]),
                kv,
                config(),
                RealEnv(),
                self.control,
                engine_id=engine_id,
                metrics=TransferMetrics(Registry()),
            ) as transfers,
        ):
            await self.control.put(transfers.store.key(engine_id), transfers.metadata())
            yield transfers, plane
