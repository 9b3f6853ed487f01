"""The index of KV blocks over the simulated NATS, with the network and the server failing at will."""

from __future__ import annotations

import random
from contextlib import AbstractAsyncContextManager

import attrs
import pytest
import trio

from tests.runtime.kv.caching import CachedSequences
from tests.worlds import on_host
from trinamo.runtime.config.planes import NatsConfig
from trinamo.runtime.kv.events import KvEventSource
from trinamo.runtime.kv.index import KvIndex
from trinamo.runtime.planes import EventPlane
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.kv.events import BlockSet
from trinamo.runtime.protocol.kv.names import block_keys
from trinamo.sim import Network, SeedChoices, SimEnv, World
from trinamo.sim.services import SimulatedNats
from trinamo.transports.nats import open_nats

ENDPOINT = EndpointName("ns", "engine", "generate")
WORKERS = ("worker-0", "worker-1", "worker-2")
STEPS = 60
QUIET_S = 30.0


@attrs.define(eq=False)
class Worker:
    """One life of a worker: a cache that is always full, and what it tells."""

    source: KvEventSource
    cache: CachedSequences = attrs.field(factory=lambda: CachedSequences(24, 2))

    def step(self, dice: random.Random) -> None:
        tokens = [dice.randrange(3) for _ in range(dice.randrange(2, 12))]
        self.cache.run(dice.randrange(4), tokens)
        self.source.tell(self.cache.take_events())

    @property
    def held(self) -> set[int]:
        blocks = BlockSet()
        for event in self.cache.pool.stored():
            blocks.apply(event)
        return set(block_keys(tuple(blocks.hashes)))


class Cluster:
    """A router and workers on hosts of their own, a broker between them, and someone who breaks it."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.world = World(SeedChoices(seed), virtual_s_max=900, trace_steps=False, ambient="raise")
        self.network = Network(self.world, tear_one_in=8, short_one_in=16)
        self.nats = SimulatedNats(self.world)
        self.is_up = True
        self.workers: dict[str, Worker] = {}
        self.scopes: dict[str, trio.CancelScope] = {}
        self.ended: dict[str, trio.Event] = {}
        self.cut: dict[str, None] = {}
        self.incarnations: dict[str, int] = dict.fromkeys(WORKERS, 0)

    def plane(self, name: str) -> AbstractAsyncContextManager[EventPlane]:
        env, section = SimEnv(self.world, name), NatsConfig(outgoing_messages_max=8)
        return on_host(self.world, name, lambda: open_nats(self.nats.url, section, env=env))

    async def play(self) -> None:
        self.nats.boot()
        async with self.plane("router") as ours, trio.open_nursery() as nursery:
            index = KvIndex(ours, ENDPOINT)
            await nursery.start(index.run)
            for name in WORKERS:
                index.join(name)
                await nursery.start(self.live, name)
            for _ in range(STEPS):
                await self.fault(nursery)
                name = self.dice.choice(WORKERS)
                for _ in range(self.dice.randrange(4)):
                    self.workers[name].step(self.dice)
                await trio.sleep(self.dice.choice([0.0, 0.02, 0.3, 1.5]))
            assert any(worker.held for worker in self.workers.values())
            for name in ("router", *WORKERS):
                self.network.heal(name, self.nats.name)
            if not self.is_up:
                self.nats.restart()
            await trio.sleep(QUIET_S)
            for name in WORKERS:
                assert index.blocks(name) == self.workers[name].held
            self.gaps = index.statistics()["gaps"]
            self.restarts = index.statistics()["restarts"]
            nursery.cancel_scope.cancel()

    async def live(self, name: str, *, task_status: trio.TaskStatus[None]) -> None:
        self.incarnations[name] += 1
        ended = self.ended[name] = trio.Event()
        with trio.CancelScope() as scope:
            async with self.plane(name) as plane:
                source = KvEventSource(
                    plane,
                    ENDPOINT,
                    instance_id=name,
                    incarnation=self.incarnations[name],
                    outbox_blocks_max=16,
                )
                self.workers[name], self.scopes[name] = Worker(source), scope
                await source.run(task_status=task_status)
        ended.set()

    async def fault(self, nursery: trio.Nursery) -> None:
        name = self.dice.choice(("router", *WORKERS))
        match self.dice.randrange(10):
            case 0 if self.is_up:
                self.nats.kill()
                self.is_up = False
            case 1 | 2 if not self.is_up:
                self.nats.restart()
                self.is_up = True
            case 3:
                self.network.cut(name, self.nats.name)
                self.network.reset(name, self.nats.name)
                self.cut[name] = None
            case 4 | 5:
                self.network.heal(name, self.nats.name)
                self.cut.pop(name, None)
            case 6 | 7 if self.is_up and name != "router" and name not in self.cut:
                # It ends and begins anew, with nothing in its cache, under the same id.
                self.scopes[name].cancel()
                await self.ended[name].wait()
                await nursery.start(self.live, name)
            case _:
                pass


@pytest.mark.check
@pytest.mark.parametrize("seed", range(6))
def test_whatever_breaks_between_them_the_index_gets_there(seed: int) -> None:
    """I10 on the simulated network: after quiescence equal to what the workers hold."""
    cluster = Cluster(seed)
    cluster.world.run(cluster.play)
    assert cluster.gaps + cluster.restarts > 0
