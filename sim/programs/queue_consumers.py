"""Real consumers of a work queue on a simulated broker, and a mutant whose broker forgets its fence.

`runtime/queues/consumer.py` runs on hosts that are paused for longer than their leases, killed and
booted again; the broker dies and comes back, has no leader, and loses answers. Whatever happens, no
ack of a job is applied twice, no attempt has two effects (I8), and once the faults are over every
job is done. The mutant (`fenced=False`) is S10 of the catalogue: a broker that takes an ack under a
token whose lease has expired.

What this module does not do: search. `sim.explore` does, with this module as the scenario.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import trio

from trinamo.runtime.planes import LeasedJob, QueueLimits, Settlement
from trinamo.runtime.protocol.queue.consumer import Backoff
from trinamo.runtime.protocol.queue.work_queue import WorkQueueModel
from trinamo.runtime.queues.consumer import ConsumerLimits, open_consumer

from ..core.choices import Choices
from ..core.env import SimEnv
from ..core.errors import Violation
from ..core.policies import Policy
from ..core.world import World
from ..net.network import Network
from ..services import SimulatedNats, open_simulated_nats

QUEUE: Final = "jobs"
LIMITS: Final = QueueLimits(visibility_timeout_s=2.0, attempts_max=50)
PACE: Final = ConsumerLimits(jobs_max=2, backoff=Backoff(min_s=0.2, max_s=0.5))
WORK_S: Final = (0.3, 1.0, 5.0)
"""How long a job takes; the last needs its lease extended."""
FAULTS: Final = ("pause", "kill", "broker", "leaderless", "lost answer")
"""The last is left out without `losses`."""
FAULT_EVERY_S: Final = 1.5
FAULT_S: Final = 3.0
"""Longer than a lease, so that what is paused for it wakes up without one."""
HORIZON_S: Final = 120.0


class _Ledger:
    """What the consumers did, as seen from outside."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.effects: Counter[tuple[str, int]] = Counter()

    def ack_applied(self, job_id: str) -> None:
        self.done[job_id] += 1
        if self.done[job_id] > 1:
            raise Violation("I8", f"the ack of job {job_id} is applied twice")

    def effect(self, job: LeasedJob) -> None:
        self.effects[job.id, job.attempt] += 1
        if self.effects[job.id, job.attempt] > 1:
            raise Violation("I8", f"attempt {job.attempt} of job {job.id} has two effects")


class _LedgerEnv(SimEnv):
    """Enters how jobs end into the ledger."""

    def __init__(self, world: World, name: str, ledger: _Ledger) -> None:
        super().__init__(world, name)
        self._ledger = ledger

    def note(self, kind: str, /, **fields: Any) -> None:
        super().note(kind, **fields)
        if kind == "queue.outcome" and fields["outcome"] == "done":
            self._ledger.ack_applied(fields["job"])


class _Cluster:
    """One broker, one producer, some consumers."""

    def __init__(self, world: World, *, jobs: int, workers: int, losses: bool) -> None:
        self.world = world
        self.nats = SimulatedNats(world)
        self.ledger = _Ledger()
        self.consumers = [f"consumer-{number}" for number in range(workers)]
        self._jobs = jobs
        self._faults = FAULTS if losses else FAULTS[:-1]
        self._lives: Counter[str] = Counter()

    @property
    def model(self) -> WorkQueueModel:
        return self.nats.queues.model(QUEUE)

    async def fill(self) -> None:
        """The producer's life."""
        rng = self.world.choices.stream("producer")
        async with (
            open_simulated_nats(self.nats.name, rng=rng) as plane,
            plane.work_queue(QUEUE, limits=LIMITS) as queue,
        ):
            for number in range(self._jobs):
                await queue.put(f"job-{number}", b"")

    def boot(self, name: str) -> None:
        self._lives[name] += 1
        self.world.boot(name, self._consume, f"{name}.{self._lives[name]}")

    async def _consume(self, life: str) -> None:
        env = _LedgerEnv(self.world, life, self.ledger)

        async def work(job: LeasedJob, _: bytes) -> None:
            await trio.sleep(WORK_S[self.world.choices.below(len(WORK_S), "work")])
            self.ledger.effect(job)
            if job.attempt == 1 and self.world.choices.chance(4, "failure"):
                raise ValueError("failed once")

        async with (
            open_simulated_nats(self.nats.name, rng=self.world.choices.stream(life)) as plane,
            plane.work_queue(QUEUE) as queue,
            open_consumer(queue, work, decode=bytes, env=env, limits=PACE),
        ):
            await trio.sleep_forever()

    def strike(self) -> None:
        """One fault, of a kind and on a host that the choices name; it ends by itself."""
        world, choices = self.world, self.world.choices
        victim = self.consumers[choices.below(len(self.consumers), "victim")]
        match self._faults[choices.below(len(self._faults), "fault")]:
            case "pause":
                world.pause(victim)
                world.after(FAULT_S, world.resume, victim)
            case "kill":
                world.kill(victim)
                world.after(FAULT_S, self.boot, victim)
            case "broker":
                self.nats.kill()
                world.after(FAULT_S, self.nats.restart)
            case "leaderless":
                self.nats.refuse(FAULT_S)
            case _:
                self.nats.lose_replies()


def _take_any_ack(model: WorkQueueModel) -> None:
    """Plant S10: an ack under a token that is no longer leased is applied all the same."""
    fenced = model.ack

    def ack(token: str, *, now: float) -> Settlement:
        fenced(token, now=now)
        return Settlement.APPLIED

    model.ack = ack  # type: ignore[method-assign]


def run(
    choices: Choices,
    *,
    fenced: bool = True,
    workers: int = 2,
    jobs: int = 3,
    losses: bool = True,
    faults: int = 3,
    policy: Policy = "grouped",
) -> World:
    """Play until every job is done, or to the horizon; raises `Violation` I8 or `liveness`."""
    world = World(choices, policy=policy, steps_max=400_000, virtual_s_max=2 * HORIZON_S)
    Network(world, latency_s=0.01, jitter_s=0.005)
    cluster = _Cluster(world, jobs=jobs, workers=workers, losses=losses)

    async def main() -> None:
        cluster.nats.boot()
        await world.boot("producer", cluster.fill).ended.wait()
        if not fenced:
            _take_any_ack(cluster.model)
        for name in cluster.consumers:
            cluster.boot(name)
        for _ in range(faults):
            await trio.sleep(FAULT_EVERY_S)
            cluster.strike()
            # One at a time: who is struck twice would be booted twice.
            await trio.sleep(FAULT_S)
        with trio.move_on_after(HORIZON_S):
            while cluster.model.statistics(now=cluster.nats.clock.now()).depth:  # noqa: ASYNC110 -- on the virtual clock
                await trio.sleep(0.5)
        # Long enough for whatever is still on its way to do its harm.
        await trio.sleep(2 * max(WORK_S))
        found = cluster.model.statistics(now=cluster.nats.clock.now())
        if found.depth or found.dead:
            raise Violation("liveness", f"{found.depth} jobs left, {found.dead} dead")

    world.run(main)
    return world
