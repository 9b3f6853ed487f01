"""A process that writes into blocks it was granted, slowly, for tests that strike it meanwhile.

`python -m tests.transports.borrower SETTINGS`, a JSON object. It prints its descriptor as a line of JSON,
and then takes commands, a line each, until its input ends.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs
import numpy as np
import trio

from tests.runtime.kv.ranges import memory_of
from tests.transports.memory_owner import open_backend
from trinamo.runtime.config.config import Config, load_config
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.kv.memory import KvLayout, KvMemory, KvShape, fingerprint
from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.kv.regions import KvCache
from trinamo.runtime.kv.transfer.engine import EngineTransfers, open_engine_transfers
from trinamo.runtime.kv.transfer.metrics import TransferMetrics
from trinamo.runtime.metrics.tallies import Registry
from trinamo.runtime.planes.transports import TransferChain
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.one_sided.memory import OneSidedRegion
from trinamo.transports.one_sided.mover import OneSidedMover
from trinamo.transports.tcp import TcpOptions, TransferOptions, open_transfer_plane

BLOCKS = 96
SHAPE = KvShape(layers=1, heads=1, channels=64, block_tokens=256, dtype="<i2")
"""64 KB a block, so that a chunk of the backends is eight of them."""
_PAUSE_S = 2.0
"""Of the writer, before and after every chunk: some ten seconds in all, in which it can be struck."""


@attrs.frozen
class Settings:
    """What the process is told."""

    backend: str
    port: int = 0


@asynccontextmanager
async def open_engine(
    backend: str, engine_id: str, port: int = 0, **overrides: Any
) -> AsyncIterator[tuple[EngineTransfers, MemoryControlPlane, TransferMetrics]]:
    """An engine that moves blocks by one backend of `memory_owner.BACKENDS`, as the cli opens it."""
    keys = {f"data_plane.transfer.{key}": value for key, value in overrides.items()}
    config: Config = load_config(environ={}, overrides=keys)
    memory, pool = KvMemory(SHAPE, BLOCKS), BlockPool(BLOCKS)
    kv = KvCache(
        memory=memory,
        pool=pool,
        fingerprint=fingerprint("t", "1", "m", SHAPE, KvLayout.BLOCK_FIRST),
    )
    control, metrics = MemoryControlPlane(), TransferMetrics(Registry())
    async with open_transfer_plane(TransferOptions(tcp=TcpOptions(port=port))) as tcp:
        async with open_backend(backend) as plane:
            chain = TransferChain(planes=[plane], order=[plane.backend], settlement=tcp.mover)
            async with open_engine_transfers(
                chain, kv, config, RealEnv(), control, engine_id=engine_id, metrics=metrics
            ) as transfers:
                yield transfers, control, metrics
        assert isinstance(plane.mover, OneSidedMover)
        tcp.mover.outlives_us = plane.mover.is_left_moving


async def _borrow(settings: Settings) -> None:
    async with (
        open_engine(settings.backend, "borrower", settings.port) as (transfers, control, _),
        trio.open_nursery() as nursery,
    ):
        blocks = transfers.kv.pool.take(BLOCKS)
        assert blocks is not None
        memory_of(transfers.kv).view[:] = np.int16(-1)
        for region in transfers.memory.regions.values():
            assert isinstance(region, OneSidedRegion)
            region.synchronize = lambda: time.sleep(_PAUSE_S)
        descriptor = transfers.descriptor()
        assert descriptor is not None
        print(json.dumps({"descriptor": descriptor.hex()}), flush=True)

        async def write(peer_blocks: list[int], ticket: int) -> None:
            ours = list(range(len(peer_blocks)))
            with suppress(TrinamoError):
                await transfers.write("owner", ours, peer_blocks, ticket=ticket, deadline_s=60)

        async for line in trio.wrap_file(sys.stdin):
            told = json.loads(line)
            if told["do"] == "leave":
                break
            await control.put(transfers.store.key("owner"), bytes.fromhex(told["metadata"]))
            nursery.start_soon(write, told["blocks"], told["ticket"])
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(_borrow, Settings(**json.loads(sys.argv[1])))
