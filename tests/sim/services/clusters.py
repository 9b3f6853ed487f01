"""A store, registrars on hosts of their own, and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
import trio

from trinamo.runtime.worker.registration import LeaseFacts, Registrar
from trinamo.sim import Network, SeedChoices, SimEnv, World
from trinamo.sim.services import SimulatedEtcd, open_simulated_etcd
from trinamo.transports.etcd import EtcdControlPlane

TTL_S = 10.0


@attrs.define
class Member:
    """One process that is registered, and what became of its leases."""

    name: str
    registrar: Registrar | None = None
    grants: list[float] = attrs.field(factory=list)
    losses: list[float] = attrs.field(factory=list)

    @property
    def key(self) -> str:
        return f"instances/{self.name}"

    def on_change(self, state: LeaseFacts) -> None:
        (self.grants if state.lease_id else self.losses).append(trio.current_time())


class Herd:
    """Members round one store; `renewals` are the times at which the store saw keep-alives."""

    def __init__(self, seed: int, count: int = 1, *, ttl_s: float = TTL_S) -> None:
        self.world = World(SeedChoices(seed), virtual_s_max=600, trace_steps=False, ambient="raise")
        self.network = Network(self.world)
        self.etcd = SimulatedEtcd(self.world)
        self.members = [Member(f"worker-{number}") for number in range(count)]
        self.renewals: list[float] = []
        self.renewed = trio.lowlevel.ParkingLot()
        self._ttl_s = ttl_s
        renew = self.etcd.store.keep_alive

        def keep_alive(lease_id: int, *, now: float) -> float:
            left_s = renew(lease_id, now=now)
            self.renewals.append(now)
            self.renewed.unpark_all()
            return left_s

        self.etcd.store.keep_alive = keep_alive  # type: ignore[method-assign]

    def run(self, story: Callable[[Herd], object]) -> str:
        """Boot everything, then play the story; the digest."""

        async def main() -> None:
            self.etcd.boot()
            for member in self.members:
                self.world.boot(member.name, self._be, member)
            await self.settled()
            await story(self)  # type: ignore[misc]

        return self.world.run(main)

    async def _be(self, member: Member) -> None:
        env = SimEnv(self.world, member.name)
        async with open_simulated_etcd(rng=env.rng) as plane, trio.open_nursery() as nursery:
            member.registrar = Registrar(plane, env, ttl_s=self._ttl_s, on_change=member.on_change)
            await nursery.start(member.registrar.run)
            await member.registrar.register(member.key, partial(_value, member.name))
            await trio.sleep_forever()

    def instances(self) -> dict[str, bytes]:
        """What the store's disk holds, read past all messages."""
        found = self.etcd.store.range("instances/", now=self.etcd.clock.now())
        return {entry.key: entry.value for entry in found.entries}

    async def settled(self, *, timeout_s: float = 30) -> None:
        """Wait until every member is in the store."""
        with trio.fail_after(timeout_s):
            while len(self.instances()) < len(self.members):
                await trio.sleep(0.05)

    def cut(self) -> None:
        for member in self.members:
            self.network.cut(member.name, self.etcd.name)

    def heal(self) -> None:
        for member in self.members:
            self.network.heal(member.name, self.etcd.name)


def _value(name: str, incarnation: int) -> bytes:
    return f"{name} life {incarnation}".encode()


__all__ = ["TTL_S", "EtcdControlPlane", "Herd", "Member"]
