"""Two small protocols with a bug each: a register without write-back, an election with two leaders."""

from __future__ import annotations

from typing import Any

import trio

from trinamo.sim import Bus, Checker, Choices, Linearizability, Network, Row, World
from trinamo.sim.core.policies import Policy
from trinamo.sim.net.bus import delay

REPLICAS = ("a", "b", "c")


class OneLeader(Checker):
    """At most one host leads in a term."""

    rule = "one leader"

    def __init__(self) -> None:
        self.leaders: dict[int, str] = {}

    def on(self, note: Row) -> None:
        if note.kind == "lead":
            first = self.leaders.setdefault(note.field("term"), note.host)
            if first != note.host:
                self.violate(f"{first} and {note.host} lead in term {note.field('term')}")


def _late(world: World, bus: Bus, *, one_in: int, by_s: float) -> None:
    """Some messages take much longer than others."""
    bus.rules.append(
        lambda _: delay(by_s, reorder=True) if world.choices.chance(one_in, "late") else None
    )


class _Register:
    """A replicated value (Attiya, Bar-Noy and Dolev), whose readers may forget to write back."""

    def __init__(self, world: World, bus: Bus, *, writes_back: bool) -> None:
        self._world, self._bus, self._writes_back = world, bus, writes_back
        self._count = 0

    async def replica(self, name: str) -> None:
        latest: tuple[int, Any] = (0, 0)
        while True:
            message = await self._bus.receive("ask")
            channel, stamped = message.payload
            latest = max(latest, stamped)
            self._world.note("replica", stamp=latest[0])
            self._bus.send(name, message.source, channel, latest)

    async def ask(self, me: str, stamped: tuple[int, Any]) -> tuple[int, Any]:
        self._count += 1
        channel = f"answer {self._count}"
        for name in REPLICAS:
            self._bus.send(me, name, "ask", (channel, stamped))
        answers = [(await self._bus.receive(channel)).payload for _ in range(2)]
        latest: tuple[int, Any] = max(answers)
        return latest

    async def write(self, me: str, stamp: int, value: int) -> None:
        await self.ask(me, (stamp, value))

    async def read(self, me: str) -> int:
        latest = await self.ask(me, (0, 0))
        if self._writes_back:
            await self.ask(me, latest)
        value: int = latest[1]
        return value


def replicated_register(
    choices: Choices, *, policy: Policy = "fifo", writes_back: bool = False
) -> World:
    """A writer and two readers, one after the other; linearizable only if readers write back."""
    world = World(choices, policy=policy, virtual_s_max=60)
    bus = Bus(world, Network(world, latency_s=0.01, jitter_s=0))
    _late(world, bus, one_in=4, by_s=0.5)
    store = _Register(world, bus, writes_back=writes_back)
    history = world.watch(Linearizability(initial=0))

    async def writer() -> None:
        write = history.call("writer", "write", 1)
        await store.write("writer", 1, 1)
        history.ends(write)

    async def reader(name: str) -> None:
        for _ in range(3):
            read = history.call(name, "read")
            history.ends(read, await store.read(name))
            await trio.sleep(0.02)

    async def main() -> None:
        for name in REPLICAS:
            world.boot(name, store.replica, name)
        hosts = [world.boot("writer", writer)]
        hosts += [world.boot(name, reader, name) for name in ("reader1", "reader2")]
        for host in hosts:
            await host.ended.wait()

    world.run(main)
    return world


def election(
    choices: Choices, *, policy: Policy = "fifo", remembers_its_vote: bool = False
) -> World:
    """Three hosts vote for whoever asks first; one that forgets its vote as it restarts votes twice."""
    world = World(choices, policy=policy, virtual_s_max=60)
    network = Network(world, latency_s=0.01, jitter_s=0)
    bus = Bus(world, network)
    _late(world, bus, one_in=3, by_s=0.1)
    world.watch(OneLeader())
    disks: dict[str, dict[int, str]] = {name: {} for name in REPLICAS}

    async def voter(name: str) -> None:
        votes = disks[name] if remembers_its_vote else {}
        while True:
            message = await bus.receive("vote")
            term, candidate = message.payload
            if votes.setdefault(term, candidate) == candidate:
                world.note("vote", term=term, candidate=candidate)
                bus.send(name, message.source, "granted", (term, name))

    async def candidate(name: str) -> None:
        await trio.sleep(0.01 * choices.below(4, "start"))
        for voter_name in REPLICAS:
            bus.send(name, voter_name, "vote", (1, name))
        granted: set[str] = set()
        while len(granted) < 2:
            granted.add((await bus.receive("granted")).payload[1])
        world.note("lead", term=1)

    async def main() -> None:
        for name in REPLICAS:
            world.boot(name, voter, name)
        for name in ("x", "y"):
            world.boot(name, candidate, name)
        if choices.chance(3, "restart"):
            await trio.sleep(0.01 * (1 + choices.below(8, "when")))
            restarted = REPLICAS[choices.below(3, "which")]
            world.kill(restarted)
            world.boot(restarted, voter, restarted)
        await trio.sleep(1)

    world.run(main)
    return world
