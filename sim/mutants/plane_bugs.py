"""Mistakes in leases, watches, events and queues: what outages of the servers bring out; see `bugs.py`."""

from __future__ import annotations

import math
from typing import Any

import trio

from trinamo.runtime.caller import clients
from trinamo.runtime.caller.instances import Instances
from trinamo.runtime.caller.liveness import Monitor
from trinamo.runtime.caller.record import InstanceRecord
from trinamo.runtime.caller.router import Router
from trinamo.runtime.errors import ControlPlaneError, LeaseLostError
from trinamo.runtime.kv.index import KvIndex
from trinamo.runtime.kv.names import share_names
from trinamo.runtime.planes import Snapshot
from trinamo.runtime.protocol.discovery.lease import LeaseTimer
from trinamo.runtime.protocol.discovery.presence import Presence
from trinamo.runtime.protocol.events.sequence import SequencedEvent, SequencedView, Step
from trinamo.runtime.protocol.queue.jobs import Settlement
from trinamo.runtime.protocol.queue.work_queue import WorkQueueModel
from trinamo.runtime.queues import consumer
from trinamo.runtime.queues.consumer import Consumer
from trinamo.runtime.worker.registration import Registrar
from trinamo.transports.etcd.client import Client
from trinamo.transports.etcd.control import EtcdControlPlane
from trinamo.transports.etcd.watching import WatchKeeper
from trinamo.transports.memory.store import MemoryStore
from trinamo.transports.nats.line import Line
from trinamo.transports.nats.outbox import Interest

from ..cluster.services import NotedStore
from ..services.connector import Connector
from .planting import Patch, bug

# --- leases and watches -------------------------------------------------------------------------------


@bug
def lease_loss_exits() -> list[Patch]:
    """A lost lease ends the process."""
    hold = Registrar._hold  # noqa: SLF001 -- what is replaced

    async def exiting(self: Any, timer: Any) -> None:
        try:
            await hold(self, timer)
        except LeaseLostError as error:
            raise RuntimeError("the primary lease is lost: shutting down") from error

    return [(Registrar, "_hold", exiting)]


@bug
def lease_loss_unnoticed() -> list[Patch]:
    """A renewal or a write that the store refuses is tried again for ever."""
    renew, put = Registrar._renew, Registrar._put  # noqa: SLF001 -- what is replaced

    async def hopeful(self: Any, timer: Any) -> float:
        try:
            return await renew(self, timer)
        except LeaseLostError:
            return trio.current_time() + 1.0

    async def stubborn(self: Any, key: Any) -> None:
        try:
            await put(self, key)
        except LeaseLostError as error:
            raise ControlPlaneError(error.message) from error

    return [(Registrar, "_renew", hopeful), (Registrar, "_put", stubborn)]


@bug
def leases_outlive_their_time() -> list[Patch]:
    """The store ends leases long after it said it would."""
    keep_alive = MemoryStore.keep_alive

    def generous(self: MemoryStore, lease_id: int, *, now: float) -> float:
        left_s = keep_alive(self, lease_id, now=now)
        self._leases[lease_id].deadline += 1000.0
        return left_s

    return [(MemoryStore, "keep_alive", generous)]


@bug
def leases_end_twice() -> list[Patch]:
    """The store says of a lease that was revoked that its time is over."""
    revoke = NotedStore.revoke_lease

    def forgetful(self: Any, lease_id: int, *, now: float) -> None:
        revoke(self, lease_id, now=now)
        self._world.note("store.expire", lease=lease_id)

    return [(NotedStore, "revoke_lease", forgetful)]


@bug
def renewal_that_failed_waits_a_ttl() -> list[Patch]:
    """After a renewal that failed the next comes a TTL later, and not while something is left of it."""

    def fixed(self: Any, now: float) -> float:  # noqa: ARG001 -- the method's parameter
        return float(self.ttl_s)

    return [(LeaseTimer, "retry_s", fixed)]


@bug
def incarnations_begin_anew() -> list[Patch]:
    """A process that lost its lease counts the next one as its first."""
    lost = Registrar._lost  # noqa: SLF001 -- what is replaced

    def forgets(self: Any, error: Any) -> None:
        lost(self, error)
        self.state.incarnation = 0

    return [(Registrar, "_lost", forgets)]


@bug
def herd_without_jitter() -> list[Patch]:
    """Everyone who lost the store at one moment comes back at one moment."""
    # Each would do to keep a herd apart: one dials, one opens streams, the others register and renew.
    own = [(Registrar, "_jitter"), (Registrar, "_early")]
    owners: list[tuple[Any, str]] = [(Connector, "_jitter"), (Client, "jittered"), *own]
    return [(owner, name, lambda _, seconds: seconds) for owner, name in owners]


@bug
def list_then_watch_from_now() -> list[Patch]:
    """A watch begins at the present, some time after its snapshot was read."""
    read = EtcdControlPlane.range

    async def late(self: Any, prefix: str) -> Snapshot:
        found = await read(self, prefix)
        await trio.sleep(0.05)
        now = await read(self, prefix)
        return Snapshot(now.revision, found.entries)

    return [(EtcdControlPlane, "range", late)]


@bug
def resync_without_deletes() -> list[Patch]:
    """After a gap only what is new is taken; what vanished meanwhile stays."""

    def merge(self: Any, named: Any) -> None:
        for instance in named.values():
            if instance is not None:
                self.put(instance)

    return [(Instances, "replace", merge)]


@bug
def silence_is_health() -> list[Patch]:
    """A connection that says nothing is trusted for ever, as long as no FIN comes."""
    open_keeper = WatchKeeper.__init__

    async def trusting(self: Any, *_: object) -> None:  # noqa: ARG001 -- the method's parameter
        await trio.sleep_forever()

    def patient(self: Any, client: Any, table: Any, *, silence_s: float) -> None:  # noqa: ARG001
        open_keeper(self, client, table, silence_s=math.inf)

    return [
        (Connector, "_listen_for_silence", trusting),
        (WatchKeeper, "__init__", patient),
    ]


@bug
def deleted_is_gone() -> list[Patch]:
    """What discovery deletes is dropped in that moment, however well its connection stands."""
    return [(InstanceRecord, "is_kept", False)]


@bug
def left_instances_stay() -> list[Patch]:
    """An instance that has left keeps its record, and the task that watches it."""
    return [(Instances, "_forget_if_over", lambda *_: None)]


@bug
def cards_gone_at_once() -> list[Patch]:
    """A model is gone with its last card, though its workers are there."""
    return [(Router, "removal_grace_s", lambda *_: 0.0)]


@bug
def stale_unprobed() -> list[Patch]:
    """A connection that stands is enough to be kept; nobody asks whether the process answers."""
    ask = Monitor._probe  # noqa: SLF001 -- what is replaced

    async def trusting(self: Any, record: Any, scope: Any) -> None:
        if record.presence is not Presence.STALE:
            await ask(self, record, scope)

    return [(Monitor, "_probe", trusting)]


# --- events -----------------------------------------------------------------------------------------


@bug
def gaps_unseen() -> list[Patch]:
    """A follower applies what comes, whatever its number, and believes every heartbeat."""
    receive = SequencedView.receive

    def blind(self: Any, event: SequencedEvent) -> Step:
        is_known = event.incarnation == self.incarnation and not self.needs_snapshot
        if is_known and event.sequence > self.sequence:
            self.sequence = event.sequence - (event.body is not None)
        return receive(self, event)

    return [(SequencedView, "receive", blind)]


@bug
def snapshot_adds_only() -> list[Patch]:
    """A snapshot adds to what was known; what is gone meanwhile stays."""
    return [(KvIndex, "_empty", lambda *_: None)]


@bug
def subscriptions_forgotten() -> list[Patch]:
    """After a reconnect only the inbox is subscribed again."""
    missing = Line.missing

    def forgetful(self: Any) -> list[Interest]:
        inbox = next(iter(self.interests))
        return [each for each in missing(self) if each is inbox or not self.connection_count]

    return [(Line, "missing", forgetful)]


@bug
def routers_have_another_key() -> list[Patch]:
    """Routers name KV blocks by another key than workers do."""
    return [(clients, "share_names", lambda *of: share_names(of[0], of[1], b"another", of[3]))]


# --- work queues -------------------------------------------------------------------------------------


@bug
def stale_ack() -> list[Patch]:
    """The queue takes an acknowledgement under a token that is no longer lent."""
    fenced = WorkQueueModel.ack

    def ack(self: Any, token: str, *, now: float) -> Settlement:
        fenced(self, token, now=now)
        return Settlement.APPLIED

    return [(WorkQueueModel, "ack", ack)]


@bug
def lost_job_goes_on() -> list[Patch]:
    """A consumer that has lost its lease on a job works on, and has the effect."""
    keep = Consumer._keep  # noqa: SLF001 -- what is replaced

    async def deaf(self: Any, work: Any) -> None:
        work.scope = trio.CancelScope()
        await keep(self, work)

    return [(Consumer, "_keep", deaf)]


@bug
def done_is_unsaid() -> list[Patch]:
    """A consumer whose handler has returned says nothing, so that the job comes again."""
    return [(consumer, "verdict_on", lambda *_, **__: None)]
