"""KV events over every event plane: after an outage of the broker the index is whole again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import trio

from tests.conformance.simulated import SimulatedBroker
from tests.transports.nats.brokers import (
    Broker,
    MemoryBrokerUnderTest,
    NatsServerUnderTest,
    private_server,
    wait_away,
    wait_back,
)
from tests.worlds import in_world
from trinamo.runtime.kv.events import KvEventSource
from trinamo.runtime.kv.index import KvIndex
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.kv.events import Cleared, Removed, Stored
from trinamo.runtime.protocol.kv.names import HASH_BYTES, block_keys
from trinamo.transports.servers.binaries import find_nats_server

ENDPOINT = EndpointName("ns", "engine", "generate")
NATS: Any = "nats"


@pytest.fixture(params=["memory", "simulated", NATS])
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A broker that the test may kill and start again at the same address."""
    if request.param == "memory":
        yield MemoryBrokerUnderTest()
    elif request.param == "simulated":
        simulated = SimulatedBroker(seed=3)
        with in_world(simulated.world):
            yield simulated
    else:
        with private_server(find_nats_server()) as server:
            yield NatsServerUnderTest(server.url, server)


def hashes(start: int, stop: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(HASH_BYTES, "big") for number in range(start, stop))


async def until_known(index: KvIndex, truth: dict[str, tuple[bytes, ...]]) -> None:
    with trio.fail_after(120):
        while any(index.blocks(name) != set(block_keys(held)) for name, held in truth.items()):
            await trio.sleep(0.005)


async def test_after_an_outage_of_the_broker_the_index_equals_what_the_workers_hold(
    broker: Broker,
) -> None:
    """Killed as by kill -9: what was with it is gone, and more is told than waits for its return."""
    sources: dict[str, KvEventSource] = {}
    async with (
        broker.connect() as ours,
        broker.connect() as first,
        broker.connect() as second,
        trio.open_nursery() as nursery,
    ):
        index = KvIndex(ours, ENDPOINT)
        await nursery.start(index.run)
        for name, plane in (("a", first), ("b", second)):
            index.join(name)
            source = KvEventSource(
                plane, ENDPOINT, instance_id=name, incarnation=1, outbox_blocks_max=256, beat_s=0.1
            )
            await nursery.start(source.run)
            sources[name] = source
            source.tell([Stored(hashes(0, 100))])
        await until_known(index, {"a": hashes(0, 100), "b": hashes(0, 100)})

        await broker.stop()
        for plane in (first, second):
            await wait_away(plane)
        for number in range(100, 300):
            for source in sources.values():
                source.tell([Stored(hashes(number, number + 1))])
                source.tell([Removed(hashes(number - 100, number - 99))])
            await trio.lowlevel.checkpoint()
        # While it is away, what is known stays known.
        assert len(index.blocks("a")) == 100
        sources["b"].tell([Cleared(), Stored(hashes(500, 600))])
        await broker.start()
        for plane in (first, second):
            await wait_back(plane)

        await until_known(index, {"a": hashes(200, 300), "b": hashes(500, 600)})
        assert sum(source.statistics()["dropped"] for source in sources.values()) > 0
        assert index.statistics()["gaps"] > 0
        assert index.statistics()["lost"] == 0
        nursery.cancel_scope.cancel()
