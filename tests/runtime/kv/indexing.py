"""Engines that publish KV events, and the index that follows them, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
import trio.testing

from trinamo.runtime.kv.events import KvEventSource
from trinamo.runtime.kv.index import KvIndex
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.events.sequence import SequencedEvent, encode_event
from trinamo.runtime.protocol.kv.holders import Reach
from trinamo.runtime.protocol.kv.names import HASH_BYTES, block_keys
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane

ENDPOINT = EndpointName("ns", "engine", "generate")
TOPIC = "trinamo.kv2.ns.engine.generate"


def hashes(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(HASH_BYTES, "big") for number in numbers)


A, B, C, D = hashes(1, 2, 3, 4)


class Cluster:
    """One broker, an index on it, and sources."""

    def __init__(self, nursery: trio.Nursery, **bounds: int) -> None:
        self.nursery = nursery
        self.broker = MemoryBroker()
        self.plane = MemoryEventPlane(self.broker)
        self.index = KvIndex(self.plane, ENDPOINT, **bounds)

    async def source(
        self, instance_id: str, *, incarnation: int = 1, scope: trio.CancelScope | None = None
    ) -> KvEventSource:
        source = KvEventSource(
            MemoryEventPlane(self.broker, buffered_max=2),
            ENDPOINT,
            instance_id=instance_id,
            incarnation=incarnation,
            outbox_blocks_max=2000,
        )

        async def run(*, task_status: trio.TaskStatus[None]) -> None:
            with scope or trio.CancelScope():
                await source.run(task_status=task_status)

        await self.nursery.start(run)
        return source

    async def follow(self, instance_id: str, *, incarnation: int = 1) -> KvEventSource:
        """A source that the index knows."""
        self.index.join(instance_id)
        return await self.source(instance_id, incarnation=incarnation)

    async def say(self, instance_id: str, incarnation: int, sequence: int, body: bytes) -> None:
        """A message that no source of ours sends."""
        event = SequencedEvent(instance_id, incarnation, sequence, body)
        await self.plane.publish(f"{TOPIC}.event.{instance_id}", encode_event(event))

    def held(self, instance_id: str) -> set[bytes]:
        return {key.to_bytes(HASH_BYTES, "big") for key in self.index.blocks(instance_id)}

    def overlap(self, *hashes: bytes) -> dict[str, int]:
        return held(self.index.reach(block_keys(hashes)))


def held(reach: Reach) -> dict[str, int]:
    """How many leading blocks each holder has; those with none are left out."""
    return {name: reach.of(name) for name in reach.some(1 << 20, 0)}


@asynccontextmanager
async def cluster(**bounds: int) -> AsyncIterator[Cluster]:
    async with trio.open_nursery() as nursery:
        made = Cluster(nursery, **bounds)
        await nursery.start(made.index.run)
        yield made
        nursery.cancel_scope.cancel()
