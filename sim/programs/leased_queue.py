"""A small leased work queue, and its mutant with a planted bug: an acknowledgement that comes late.

The queue lends a job to a worker under a token and, when the lease runs out, lends it again. A
worker that was slow then acknowledges with the old token. The queue must reject that (`fenced`); the
mutant (`fenced=False`) takes it, and so commits a job twice: S10 of the catalogue. Small enough to be
searched exhaustively within a bound, it holds the simulator itself to account: the bug must be found,
and shrunk to one decision.

What this module does not do: use the runtime's work queue. Messages travel on the simulator's bus.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from ..core.choices import Choices
from ..core.host import current_host_name
from ..core.policies import Policy
from ..core.world import World
from ..errors import Violation
from ..faults import Fault, arm
from ..net.bus import Bus, Message, Verdict, delay
from ..net.network import Network

QUEUE = "queue"
LEASE_S = 1.0
HORIZON_S = 8.0
WORK_S = (0.3, 1.5)
"""How long a job takes; the second outlasts the lease."""
LATE_S = 0.4


class _Queue:
    """The server: ready jobs, leased jobs with their tokens, and what was committed."""

    def __init__(self, world: World, bus: Bus, *, jobs: int, fenced: bool) -> None:
        self._world, self._bus, self._fenced = world, bus, fenced
        self._ready = list(range(jobs))
        self._leased: dict[int, int] = {}
        self._idle: list[str] = []
        self._token = 0
        self.committed: dict[int, int] = {}

    async def serve(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                message = await self._bus.receive(QUEUE)
                kind, *fields = message.payload
                if kind == "pull":
                    if message.source not in self._idle:
                        self._idle.append(message.source)
                elif kind == "ack":
                    self._acknowledge(*fields)
                self._lend(nursery)

    def _lend(self, nursery: trio.Nursery) -> None:
        while self._ready and self._idle:
            job, worker = self._ready.pop(0), self._idle.pop(0)
            self._token += 1
            self._leased[job] = self._token
            self._world.note("queue.lend", job=job, token=self._token, worker=worker)
            self._bus.send(QUEUE, worker, "job", (job, self._token))
            nursery.start_soon(self._expire, job, self._token, nursery)

    async def _expire(self, job: int, token: int, nursery: trio.Nursery) -> None:
        await trio.sleep(LEASE_S)
        if self._leased.get(job) == token:
            del self._leased[job]
            self._ready.append(job)
            self._world.note("queue.expire", job=job, token=token)
            self._lend(nursery)

    def _acknowledge(self, job: int, token: int) -> None:
        if self._fenced and self._leased.get(job) != token:
            self._world.note("queue.reject", job=job, token=token)
            return
        # The mutant forgets to look at the token.
        self._leased.pop(job, None)
        self._world.note("queue.commit", job=job, token=token)
        if job in self.committed:
            raise Violation(
                "I8", f"job {job} is committed under token {token} and {self.committed[job]}"
            )
        self.committed[job] = token


async def _work(world: World, bus: Bus) -> None:
    while True:
        bus.send(current_host_name(), QUEUE, QUEUE, ("pull",))
        with trio.move_on_after(2 * LEASE_S):
            job, token = (await bus.receive("job")).payload
            await trio.sleep(WORK_S[world.choices.below(len(WORK_S), "work")])
            bus.send(current_host_name(), QUEUE, QUEUE, ("ack", job, token))


def run(
    choices: Choices,
    *,
    fenced: bool = True,
    workers: int = 2,
    jobs: int = 1,
    policy: Policy = "grouped",
    losses: bool = True,
    faults: Sequence[Fault] = (),
) -> World:
    """Play until every job is committed, or to the horizon; raises `Violation` I8.

    Each message may be late, and with `losses` each acknowledgement lost, as the choices say. A
    fault is as `faults.arm` takes it; a link without `to` is that to the queue, one without `for_s` is
    undone after a second.
    """
    world = World(choices, policy=policy, steps_max=20_000, virtual_s_max=10 * HORIZON_S)
    network = Network(world, latency_s=0.01, jitter_s=0)
    bus = Bus(world, network)

    def fate(message: Message) -> Verdict | None:
        if losses and message.payload[0] == "ack" and world.choices.chance(2, "loss"):
            return Verdict(copies=0)
        return delay(LATE_S, reorder=True) if world.choices.chance(2, "late") else None

    bus.rules.append(fate)
    queue = _Queue(world, bus, jobs=jobs, fenced=fenced)

    async def main() -> None:
        world.boot(QUEUE, queue.serve)
        names = [f"worker{number}" for number in range(workers)]
        for name in names:
            world.boot(name, _work, world, bus)
        usual: Fault = {"do": "", "host": "", "at_s": 0.0, "to": QUEUE, "for_s": 1.0}
        plan: list[Fault] = [{**usual, **fault} for fault in faults]
        arm(world, network, plan, boot=lambda name: world.boot(name, _work, world, bus))
        with trio.move_on_after(HORIZON_S):
            while len(queue.committed) < jobs:  # noqa: ASYNC110 -- on the virtual clock
                await trio.sleep(0.5)
            # Long enough for whatever is still on its way to do its harm.
            await trio.sleep(4 * LEASE_S)

    world.run(main)
    return world
