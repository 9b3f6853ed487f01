"""Real consumers of a work queue on a simulated broker.

`runtime/queues/consumer.py` runs on hosts that are paused for longer than their leases, killed and
booted again; the broker dies and comes back, has no leader, and loses answers. Whatever happens, no
ack of a job is applied twice, and a job has one effect (I8). It may have another only if the consumer
that had it, or the broker, was struck before that could be acknowledged: the job is redelivered. And no
handler has an effect once its lease is over. Once the faults are over every job is done, and has had its effect.

With `stranger` the members have a secret, and somebody who has the broker's token writes records of their jobs, by
which they are done. He takes leases away by that, and no more. With `late` each fault is one pause, and a job comes
into it: when its consumer reads it, the lease is over, and somebody else may have been given it.

What this module does not do: search. `sim.explore` does, with this module as the scenario.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import AbstractAsyncContextManager
from typing import Final

import trio
from typing_extensions import override

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.planes import LeasedJob, QueueLimits
from trinamo.runtime.protocol.queue.consumer import Backoff
from trinamo.runtime.queues.consumer import ConsumerLimits, open_consumer
from trinamo.transports.nats import NatsEventPlane, open_nats
from trinamo.transports.nats.queue.records import Record, StreamNames, decode_record, encode_record
from trinamo.transports.nats.queue.streams import SealedJobs
from trinamo.transports.security.sealing import Sealer

from ..core.checker import Checker
from ..core.choices import Choices
from ..core.host import HostState
from ..core.policies import Policy
from ..core.trace import Row
from ..core.world import World
from ..env import SimEnv
from ..errors import Violation
from ..net.bus import Message
from ..net.network import Network
from ..services import SimulatedNats
from ..services.nats.jetstream import ACK
from ..services.nats.wire import Deliver

QUEUE: Final = "jobs"
NAMES: Final = StreamNames(QUEUE)
LIMITS: Final = QueueLimits(visibility_timeout_s=2.0, attempts_max=50)
PACE: Final = ConsumerLimits(jobs_max=2, backoff=Backoff(min_s=0.2, max_s=0.5))
WORK_S: Final = (0.3, 1.0, 5.0)
"""How long a job takes; the last needs its lease extended."""
FAULTS: Final = ("pause", "kill", "broker", "leaderless", "lost answer")
"""The last is left out without `losses`."""
LATE_JOB: Final = "late job"
"""A consumer is paused while a job is on its way to it."""
RECORDS: Final = "records"
"""What a stranger strikes."""
SECRET: Final = b"the secret of a simulated queue: 32"
FAULT_EVERY_S: Final = 1.5
JOB_WITHIN_S: Final = 1.0
"""How long such a pause waits for a job."""
FAULT_S: Final = 3.0
"""Longer than a lease, so that what is paused for it wakes up without one."""
WAKING_S: Final = 0.05
"""What a host may need to hear, once it goes on, that a lease is over."""
HORIZON_S: Final = 120.0


class _Ledger(Checker):
    """What the consumers did, as seen from outside: a handler cannot catch what this finds."""

    rule = "I8"

    def __init__(self) -> None:
        self._done: dict[str, float] = {}
        """When the ack of each job was applied."""
        self._faults: list[tuple[str, float]] = []
        """Who was struck, nobody is the broker, and when; each lasts `FAULT_S`."""
        self.effects: dict[str, tuple[str, float]] = {}
        """Who had the last one of each job, and when."""

    @override
    def on(self, note: Row) -> None:
        if note.kind == "queue.fault":
            self._faults.append((note.field("on"), note.time_s))
        elif note.kind == "queue.outcome" and note.field("outcome") == "done":
            job, done_s = note.field("job"), self._done.get(note.field("job"))
            # Who loses the records loses what they say of a job that is done, and comes again.
            if done_s is not None and not self._struck((RECORDS,), done_s, note.time_s):
                self.violate(f"the ack of job {job} is applied twice")
            self._done[job] = note.time_s
        elif note.kind == "queue.effect":
            self._effect(note, note.host.rpartition(".")[0], note.time_s)

    def _effect(self, note: Row, host: str, now_s: float) -> None:
        job, lease_s = note.field("job"), LIMITS.visibility_timeout_s
        if not note.field("is_leased"):
            # Whoever wakes up is not told sooner than it goes on; the attempt's number is the fence.
            if not self._struck((host, RECORDS), now_s - FAULT_S - WAKING_S, now_s):
                self.violate(f"attempt {note.field('attempt')} of job {job} outlives its lease")
            return
        first, first_s = self.effects.get(job, ("", 0.0))
        struck, since_s = (first, "", RECORDS), first_s - FAULT_S - lease_s
        if first and not self._struck(struck, since_s, first_s + lease_s):
            self.violate(f"job {job} has two effects, though the first could be told")
        self.effects[job] = host, now_s

    def _struck(self, hosts: tuple[str, ...], from_s: float, until_s: float) -> bool:
        return any(host in hosts and from_s <= at_s <= until_s for host, at_s in self._faults)


class _Cluster:
    """One broker, one producer, some consumers."""

    def __init__(
        self, world: World, *, jobs: int, workers: int, losses: bool, stranger: bool, late: bool
    ) -> None:
        self.world = world
        self.nats = SimulatedNats(world)
        self.ledger = _Ledger()
        world.watch(self.ledger)
        self._secrets = [SECRET] if stranger else []
        self._seen = SealedJobs(Sealer(self._secrets, random.Random(0)), QUEUE)
        self.consumers = [f"consumer-{number}" for number in range(workers)]
        self._jobs = jobs
        self._faults = (FAULTS if losses else FAULTS[:-1]) + (("record",) if stranger else ())
        if late:
            self._faults = (LATE_JOB,)
        self._lives: Counter[str] = Counter()

    def count(self, stream: str) -> int:
        """How many messages are on the broker's disk in this stream."""
        return len(self.nats.streams.streams[stream].messages)

    def is_leased(self, job: LeasedJob) -> bool:
        """Whether the last word about the job is this lease, and the broker waits for its end still.

        Or is away: then it has not heard of an extension whose record it has, and gives the job to nobody.
        """
        streams = self.nats.streams.streams
        record = streams[NAMES.leases].of(NAMES.lease_subject(job.id))
        queued = streams[NAMES.jobs].of(NAMES.job_subject(job.id))
        if record is None or queued is None:
            return False
        due_s = streams[NAMES.jobs].consumers[NAMES.CONSUMER].due.get(queued.sequence, 0.0)
        try:
            told = decode_record(self._seen.open_record(job.id, record.message.payload))
        except RemoteProtocolError:
            return False
        is_up = self.world.host(self.nats.name).state is HostState.UP
        is_away = self.nats.is_leaderless or not is_up
        return told.token == job.token and (is_away or due_s > self.nats.clock.now())

    def open_nats(self, env: SimEnv) -> AbstractAsyncContextManager[NatsEventPlane]:
        """As a member."""
        return open_nats(self.nats.url, env=env, sealer=Sealer(self._secrets, env.rng))

    async def fill(self) -> None:
        """The producer's life."""
        async with (
            self.open_nats(SimEnv(self.world, "producer")) as plane,
            plane.work_queue(QUEUE, limits=LIMITS) as queue,
        ):
            for number in range(self._jobs):
                await queue.put(f"job-{number}", b"")

    def boot(self, name: str) -> None:
        self._lives[name] += 1
        self.world.boot(name, self._consume, f"{name}.{self._lives[name]}")

    async def _consume(self, life: str) -> None:
        env = SimEnv(self.world, life)

        async def work(job: LeasedJob, _: bytes) -> None:
            await trio.sleep(WORK_S[self.world.choices.below(len(WORK_S), "work")])
            if job.attempt == 1 and self.world.choices.chance(4, "failure"):
                raise ValueError("failed once")
            is_leased = self.is_leased(job)
            env.note("queue.effect", job=job.id, attempt=job.attempt, is_leased=is_leased)

        async with (
            self.open_nats(env) as plane,
            plane.work_queue(QUEUE) as queue,
            open_consumer(queue, work, decode=bytes, env=env, limits=PACE),
        ):
            await trio.sleep_forever()

    async def _forge(self, life: str) -> None:
        """Say of every job in the queue that it is done."""
        async with open_nats(self.nats.url, env=SimEnv(self.world, life)) as plane:
            for stored in self.nats.streams.streams[NAMES.jobs].messages.values():
                job_id = stored.message.subject.rpartition(".")[2]
                done = Record(state="done", job=stored.sequence, attempt=1, token=life, put_ns=0)
                await plane.publish(NAMES.lease_subject(job_id), encode_record(done))

    def _pause(self, victim: str) -> None:
        self.world.pause(victim)
        self.world.after(FAULT_S, self.world.resume, victim)

    def _pause_at_next_job(self, victim: str) -> None:
        """A job that is given to this consumer soon lies with it, unread, for longer than its lease."""
        rules, until_s = self.nats.interceptor.rules, self.world.current_time() + JOB_WITHIN_S

        def rule(message: Message) -> None:
            sent = message.payload
            is_job = isinstance(sent, Deliver) and sent.message.reply.startswith(ACK)
            if message.sent_s > until_s:
                rules.remove(rule)
            elif is_job and message.destination == victim:
                rules.remove(rule)
                self.world.note("queue.fault", do=LATE_JOB, on=victim)
                self._pause(victim)

        rules.append(rule)

    def strike(self) -> None:
        """One fault, of a kind and on a host that the choices name; it ends by itself."""
        world, choices = self.world, self.world.choices
        victim = self.consumers[choices.below(len(self.consumers), "victim")]
        fault = self._faults[choices.below(len(self._faults), "fault")]
        if fault == LATE_JOB:
            self._pause_at_next_job(victim)
            return
        struck = {"pause": victim, "kill": victim, "record": RECORDS}.get(fault, "")
        world.note("queue.fault", do=fault, on=struck)
        match fault:
            case "pause":
                self._pause(victim)
            case "kill":
                world.kill(victim)
                world.after(FAULT_S, self.boot, victim)
            case "broker":
                self.nats.kill()
                world.after(FAULT_S, self.nats.restart)
            case "leaderless":
                self.nats.refuse(FAULT_S)
            case "record":
                self._lives["stranger"] += 1
                world.boot("stranger", self._forge, f"stranger.{self._lives['stranger']}")
            case _:
                self.nats.lose_replies()


def run(
    choices: Choices,
    *,
    workers: int = 2,
    jobs: int = 6,
    losses: bool = True,
    stranger: bool = False,
    late: bool = False,
    faults: int = 3,
    policy: Policy = "grouped",
) -> World:
    """Play until every job is done, or to the horizon; raises `Violation` I8 or `liveness`."""
    world = World(
        choices, policy=policy, steps_max=400_000, virtual_s_max=2 * HORIZON_S, ambient="raise"
    )
    Network(world, latency_s=0.01, jitter_s=0.005)
    cluster = _Cluster(
        world, jobs=jobs, workers=workers, losses=losses, stranger=stranger, late=late
    )

    async def main() -> None:
        cluster.nats.boot()
        await world.boot("producer", cluster.fill).ended.wait()
        for name in cluster.consumers:
            cluster.boot(name)
        for _ in range(faults):
            await trio.sleep(FAULT_EVERY_S)
            cluster.strike()
            # One at a time: who is struck twice would be booted twice.
            await trio.sleep(FAULT_S)
        with trio.move_on_after(HORIZON_S):
            while cluster.count(NAMES.jobs):  # noqa: ASYNC110 -- on the virtual clock
                await trio.sleep(0.5)
        # Long enough for whatever is still on its way to do its harm.
        await trio.sleep(2 * max(WORK_S))
        left, dead = cluster.count(NAMES.jobs), cluster.count(NAMES.dead)
        if left or dead:
            raise Violation("liveness", f"{left} jobs left, {dead} dead")
        if gone := jobs - len(cluster.ledger.effects):
            raise Violation("I8", f"jobs are gone that had no effect: {gone}")

    world.run(main)
    return world
