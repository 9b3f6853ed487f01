"""Mistakes in leases, watches, events and queues: what outages of the servers, and strangers on them, bring out."""

from __future__ import annotations

import math
from typing import Any

import trio

from trinamo.runtime.caller import clients
from trinamo.runtime.caller.instances import Instances
from trinamo.runtime.caller.liveness import Monitor
from trinamo.runtime.caller.record import InstanceRecord
from trinamo.runtime.caller.router import Router
from trinamo.runtime.errors import (
    ConnectError,
    ControlPlaneError,
    LeaseLostError,
    RemoteProtocolError,
    UnavailableError,
)
from trinamo.runtime.kv.index import KvIndex
from trinamo.runtime.planes import Message, Snapshot
from trinamo.runtime.protocol.discovery.lease import LeaseTimer
from trinamo.runtime.protocol.discovery.presence import Presence
from trinamo.runtime.protocol.events.sequence import SequencedEvent, SequencedView
from trinamo.runtime.queues import consumer
from trinamo.runtime.queues.consumer import Consumer
from trinamo.runtime.worker.registration import Registrar
from trinamo.transports.etcd.client import EtcdClient
from trinamo.transports.etcd.control import EtcdControlPlane
from trinamo.transports.etcd.watches import WatchTable
from trinamo.transports.etcd.watching import WatchKeeper
from trinamo.transports.memory.store import MemoryStore
from trinamo.transports.nats import requests
from trinamo.transports.nats.outbox import Interest
from trinamo.transports.nats.queue import work_queue
from trinamo.transports.nats.queue.fetching import Fetcher
from trinamo.transports.nats.queue.records import Leave, TakeJob, judge
from trinamo.transports.nats.queue.streams import HeldJob, Leases, SealedJobs
from trinamo.transports.nats.requests import NatsRequestPlane
from trinamo.transports.security import signatures
from trinamo.transports.security.roles import Role
from trinamo.transports.security.sealing import Arrivals, SealedEvents, Sealer
from trinamo.transports.security.signed import SignedControlPlane

from ..cluster.services import NotedStore
from ..services.etcd.channel import SimulatedChannel
from .planting import BUGS, NOTHING, Patch, bug, instead_of, stands

# --- leases and watches -------------------------------------------------------------------------------


@instead_of(Registrar, "_hold")
async def lease_loss_exits(hold: Any, self: Any, timer: Any) -> None:
    """A lost lease ends the process."""
    try:
        await hold(self, timer)
    except LeaseLostError as error:
        raise RuntimeError("the primary lease is lost: shutting down") from error


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


@instead_of(MemoryStore, "keep_alive")
def leases_outlive_their_time(keep_alive: Any, self: Any, lease_id: int, *, now: float) -> Any:
    """The store ends leases long after it said it would."""
    left_s = keep_alive(self, lease_id, now=now)
    self._leases[lease_id].deadline += 1000.0
    return left_s


@instead_of(NotedStore, "revoke_lease")
def leases_end_twice(revoke: Any, self: Any, lease_id: int, *, now: float) -> None:
    """The store says of a lease that was revoked that its time is over."""
    revoke(self, lease_id, now=now)
    self._world.note("store.expire", lease=lease_id)


@instead_of(LeaseTimer, "retry_s")
def renewal_that_failed_waits_a_ttl(_: Any, self: Any, *_now: float) -> float:
    """After a renewal that failed the next comes a TTL later, and not while something is left of it."""
    return float(self.ttl_s)


@instead_of(Registrar, "_lost")
def incarnations_begin_anew(lost: Any, self: Any, error: Any) -> None:
    """A process that lost its lease counts the next one as its first."""
    lost(self, error)
    self.state.incarnation = 0


@bug
def herd_without_jitter() -> list[Patch]:
    """Everyone who lost the store at one moment comes back at one moment."""
    # Each would do to keep a herd apart: one dials, one opens streams, the others register and renew.
    own = [(Registrar, "_jitter"), (Registrar, "_early")]
    owners: list[tuple[Any, str]] = [(SimulatedChannel, "_jitter"), (EtcdClient, "jittered"), *own]
    return [(owner, name, lambda _, seconds: seconds) for owner, name in owners]


@instead_of(EtcdControlPlane, "range")
async def list_then_watch_from_now(read: Any, self: Any, prefix: str) -> Snapshot:
    """A watch begins at the present, some time after its snapshot was read."""
    found = await read(self, prefix)
    await trio.sleep(0.05)
    now = await read(self, prefix)
    return Snapshot(now.revision, found.entries)


@instead_of(WatchTable, "disconnected")
def revisions_are_believed(lose: Any, self: Any) -> None:
    """What is behind the next stream is taken for the store of before, if its revision is as high."""
    lose(self)
    for watch in self._watches:
        watch.is_proven = True


@instead_of(Instances, "replace")
def resync_without_deletes(_: Any, self: Any, named: Any) -> None:
    """After a gap only what is new is taken; what vanished meanwhile stays."""
    for instance in named.values():
        if instance is not None:
            self.put(instance)


@bug
def silence_is_health() -> list[Patch]:
    """A connection that says nothing is trusted for ever, as long as no FIN comes."""
    open_keeper = WatchKeeper.__init__

    async def trusting(*_: object) -> None:
        await trio.sleep_forever()

    def patient(self: Any, client: Any, table: Any, *, silence_s: float) -> None:  # noqa: ARG001
        open_keeper(self, client, table, silence_s=math.inf)

    return [
        (SimulatedChannel, "_listen_for_silence", trusting),
        (WatchKeeper, "__init__", patient),
    ]


# What discovery deletes is dropped in that moment, however well its connection stands.
stands("deleted_is_gone", (InstanceRecord, "is_kept", False))

# An instance that has left keeps its record, and the task that watches it.
stands("left_instances_stay", (Instances, "_forget_if_over", NOTHING))

# A model is gone with its last card, though its workers are there.
stands("cards_gone_at_once", (Router, "removal_grace_s", lambda *_: 0.0))


@instead_of(Monitor, "_probe")
async def stale_unprobed(ask: Any, self: Any, record: Any, scope: Any) -> None:
    """A connection that stands is enough to be kept; nobody asks whether the process answers."""
    if record.presence is not Presence.STALE:
        await ask(self, record, scope)


# --- events -----------------------------------------------------------------------------------------


@instead_of(SequencedView, "receive")
def gaps_unseen(receive: Any, self: Any, event: SequencedEvent) -> Any:
    """A follower applies what comes, whatever its number, and believes every heartbeat."""
    is_known = event.incarnation == self.incarnation and not self.needs_snapshot
    if is_known and event.sequence > self.sequence:
        self.sequence = event.sequence - (event.body is not None)
    return receive(self, event)


# A snapshot adds to what was known; what is gone meanwhile stays.
stands("snapshot_adds_only", (KvIndex, "_empty", NOTHING))


@bug
def subscriptions_forgotten() -> list[Patch]:
    """After a reconnect only the inbox is subscribed again."""
    from trinamo.transports.nats.island import Island  # noqa: PLC0415 -- it brings asyncio along

    missing = Island.missing

    def inbox_alone(self: Any) -> list[Interest]:
        inbox = next(iter(self.interests))
        return [each for each in missing(self) if each is inbox or not self.connection_count]

    return [(Island, "missing", inbox_alone)]


@instead_of(clients, "share_names")
def routers_have_another_key(share: Any, *of: Any) -> Any:
    """Routers name KV blocks by another key than workers do."""
    return share(of[0], of[1], b"another", of[3])


# --- work queues -------------------------------------------------------------------------------------


@bug
def stale_ack() -> list[Patch]:
    """A lease is settled on top of whatever record there is, however long it is over."""
    write = Leases.write

    async def overwrite(
        self: Any, job_id: str, record: Any, _revision: int, *, deadline: float
    ) -> int | None:
        _, last = await self.read(job_id, deadline=deadline)
        return await write(self, job_id, record, last, deadline=deadline)

    def endless(delivery: Any, record: Any, revision: int, _until: float) -> HeldJob:
        return HeldJob(delivery, record, revision, math.inf)

    return [(work_queue, "HeldJob", endless), (Leases, "write", overwrite)]


@instead_of(Consumer, "_keep")
async def lost_job_goes_on(keep: Any, self: Any, work: Any) -> None:
    """A consumer that has lost its lease on a job works on, and has the effect."""
    work.scope = trio.CancelScope()
    await keep(self, work)


# A consumer whose handler has returned says nothing, so that the job comes again.
stands("done_is_unsaid", (consumer, "verdict_on", NOTHING))


@instead_of(SealedJobs, "open_record")
def records_unread(open_record: Any, self: Any, job_id: str, sealed: bytes) -> Any:
    """Whoever wrote how far a job is counts."""
    try:
        return open_record(self, job_id, sealed)
    except RemoteProtocolError:
        return sealed


@instead_of(Fetcher, "fetch")
async def old_delivery_is_new(fetch: Any, self: Any, *, give_up_at: float) -> Any:
    """A lease counts from when its delivery is looked at, however long that lay in a stopped process."""
    found = await fetch(self, give_up_at=give_up_at)
    return found and (found[0], trio.current_time())


@bug
def late_delivery_is_taken() -> list[Patch]:
    """It takes the lease of whoever was given the job since, too."""

    def take(delivery: Any, record: Any, *of: Any, **more: Any) -> Any:
        verdict = judge(delivery, record, *of, **more)
        return TakeJob(record.attempt + 1) if isinstance(verdict, Leave) else verdict

    return [*BUGS["old_delivery_is_new"](), (work_queue, "judge", take)]


# --- signatures ---------------------------------------------------------------------------------------

# Whatever is in the store, and whoever put it there, counts.
stands("entries_unread", (SignedControlPlane, "_fault", lambda *_: ""))

# The signature of whoever has a certificate of the fleet counts everywhere.
stands("signers_role_unread", (signatures, "writers_of", lambda *_: frozenset(Role)))


@instead_of(SealedEvents, "opened")
def reports_unread(opened: Any, self: Any, message: Message, *once: Any) -> Message:
    """What anybody tells in the name of a worker is believed."""
    told: Message | None = opened(self, message, *once)
    return message if told is None else told


# What a member said is heard as often as anybody says it.
stands("heard_again", (Arrivals, "takes", lambda *_: True))


# --- seals ----------------------------------------------------------------------------------------------


@bug
def nothing_is_sealed() -> list[Patch]:
    """Messages go as they are, and are taken as they come."""
    return [
        (Sealer, "seal", lambda _, message, __: message),
        (Sealer, "open", lambda _, message, *__, **___: message),
    ]


@bug
def seal_fits_everywhere() -> list[Patch]:
    """A seal does not say what the message is about."""
    seal, open_ = Sealer.seal, Sealer.open
    return [
        (Sealer, "seal", lambda self, message, _: seal(self, message, b"")),
        (Sealer, "open", lambda self, sealed, _, **once: open_(self, sealed, b"", **once)),
    ]


@instead_of(Sealer, "open")
def unopened_is_an_answer(
    open_: Any, self: Any, sealed: bytes, about: bytes, *, once: Any = None
) -> bytes:
    """A request is over with the first thing that anybody answers."""
    opened = b""
    try:
        opened = open_(self, sealed, about, once=once)
    except RemoteProtocolError:
        if once:
            raise
    return opened


@instead_of(NatsRequestPlane, "is_lost")
async def silent_is_gone(*_: Any) -> bool:
    """Whoever has not acknowledged for a second is gone, and is not even asked."""
    await trio.lowlevel.checkpoint()
    return True


@instead_of(NatsRequestPlane, "hold")
async def unanswered_is_gone(_: Any, __: Any, ___: Any, on_connected: Any, **____: Any) -> None:
    """Whoever answers no probe for a second is gone, though discovery names it."""
    on_connected()
    await trio.sleep_forever()


@instead_of(requests._Delivery, "_ask")  # noqa: SLF001 -- what is replaced
async def nobody_there_is_an_answer(ask: Any, self: Any, sealed: bytes) -> Any:
    """That nobody is subscribed counts as a refusal, as if a worker had given it."""
    try:
        return await ask(self, sealed)
    except ConnectError as error:
        raise UnavailableError(error.message) from error
