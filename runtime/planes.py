"""What a transport must offer: one typing.Protocol per plane.

A *plane* is a kind of traffic, a *transport* a technology that carries it. The runtime knows only
these interfaces; `trinamo.cli` puts concrete transports behind them. One conformance suite per
interface lives in `tests/conformance/` and runs on every implementation.

Cancellation: every method here may be cancelled at any checkpoint. A cancelled write has an
unknown outcome, exactly like one that raised `UnknownOutcomeError`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol, Self

import attrs
import trio

from .context import Context
from .errors import TrinamoError
from .protocol.request import Ack, ConnectionInfo, Envelope

__all__ = [
    "CallHome",
    "ControlPlane",
    "Delete",
    "Entry",
    "EventPlane",
    "Lease",
    "Message",
    "Put",
    "PutOutcome",
    "Registration",
    "RequestPlane",
    "RequestServer",
    "RequestService",
    "ResponseChannel",
    "ResponsePlane",
    "ResponseSender",
    "Resync",
    "Snapshot",
    "Subscription",
    "WatchEvent",
]


# --- control plane ---------------------------------------------------------------------------


@attrs.frozen
class Entry:
    """One key as the store holds it. `mod_revision` is the store revision of its last change."""

    key: str
    value: bytes
    mod_revision: int
    create_revision: int
    lease_id: int = 0


@attrs.frozen
class Snapshot:
    """All entries under a prefix as of `revision`, in key order. Always a watch's first event."""

    revision: int
    entries: Sequence[Entry]


@attrs.frozen
class Put:
    """A key was created or changed."""

    entry: Entry


@attrs.frozen
class Delete:
    """A key is gone, by a delete or with its lease, as of `revision`."""

    key: str
    revision: int


@attrs.frozen
class Resync:
    """History between two points was lost; this is all that is true now.

    Whatever the receiver holds and `entries` does not name has been deleted meanwhile.
    """

    revision: int
    entries: Sequence[Entry]


WatchEvent = Snapshot | Put | Delete | Resync


@attrs.frozen
class Lease:
    """A lease as granted: the store deletes its keys `ttl_s` seconds after the last keep-alive."""

    id: int
    ttl_s: float


@attrs.frozen
class PutOutcome:
    """What a guarded write found. `revision` is the store's revision after the attempt."""

    succeeded: bool
    revision: int


class ControlPlane(Protocol):
    """Small data with strong consistency: registration, discovery, leases, configuration.

    Keys are `/`-separated text. Values are at most `value_bytes_max` (1 MiB unless the transport
    says less). Unless said otherwise every method raises `ConnectError` (nothing was sent),
    `UnknownOutcomeError` (a write may have happened), `DeadlineError` (a read got no answer in
    time) or `ControlPlaneError` (the store said no).
    """

    async def get(self, key: str) -> Entry | None:
        """The entry under exactly `key`, or None."""
        ...

    async def range(self, prefix: str) -> Snapshot:
        """Every entry whose key starts with `prefix`, from one revision."""
        ...

    async def put(self, key: str, value: bytes, *, lease_id: int = 0) -> int:
        """Write without a guard and return the new revision; `lease_id` 0 means for ever.

        Raises `LeaseLostError` if the lease is not known.
        """
        ...

    async def compare_and_put(
        self, key: str, value: bytes, *, mod_revision: int, lease_id: int = 0
    ) -> PutOutcome:
        """Write only if the key's `mod_revision` is this one; 0 means only if it is absent.

        Safe to repeat after `UnknownOutcomeError`: at most one attempt takes effect.
        """
        ...

    async def delete(self, key: str) -> bool:
        """Delete exactly `key`; whether it was there."""
        ...

    async def delete_prefix(self, prefix: str) -> int:
        """Delete every key that starts with `prefix`; how many there were."""
        ...

    async def grant_lease(self, ttl_s: float) -> Lease:
        """Ask for a lease. The store may round `ttl_s` up to whole seconds."""
        ...

    async def keep_alive(self, lease_id: int) -> float:
        """Renew once and return the seconds left. Raises `LeaseLostError` if it is gone."""
        ...

    async def revoke_lease(self, lease_id: int) -> None:
        """Give the lease up and delete its keys now. A lease not known is no error."""
        ...

    def watch(self, prefix: str) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        """Watch a prefix: first a `Snapshot`, then every change after it, in revision order.

        No change between the snapshot and the stream is lost. After an outage the stream resumes
        where it was; if history was compacted meanwhile, one `Resync` takes its place. The
        iterator never ends by itself; it raises only what is beyond repair.
        """
        ...

    async def check_health(self) -> str:
        """One line about the store (version, address); raises if it does not answer."""
        ...


# --- event plane -----------------------------------------------------------------------------


@attrs.frozen
class Message:
    """One message as received. `reply` is the subject to answer on, or empty."""

    subject: str
    payload: bytes
    reply: str = ""
    headers: Mapping[str, str] = attrs.field(factory=dict)


class Subscription(Protocol):
    """Messages of one subscription, in arrival order; bounded, oldest kept, newest dropped."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Message:
        """The next message. A receive that is cancelled loses none."""
        ...

    @property
    def dropped(self) -> int:
        """How many messages were dropped because `pending_max` were waiting."""
        ...


class EventPlane(Protocol):
    """Many small messages, at most once: KV events, load, status; and request/reply.

    Subjects are `.`-separated tokens; in subscriptions `*` stands for one token and a final `>`
    for one or more.
    """

    async def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] = {}
    ) -> None:
        """Send and forget. While the broker is away messages wait in a bounded buffer.

        Raises `OverloadedError` if that buffer is full: the message is dropped and counted.
        """
        ...

    def subscribe(
        self, subject: str, *, group: str = "", pending_max: int = 4096
    ) -> AbstractAsyncContextManager[Subscription]:
        """Receive what is published from now on; one member per message within a `group`."""
        ...

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> Message:
        """Publish and await one reply.

        Raises `UnavailableError` at once if nobody is subscribed, `DeadlineError` when the time
        is up (the request may have been received).
        """
        ...

    async def check_health(self) -> str:
        """One line about the broker; raises `ConnectError` if it is not connected."""
        ...

    @property
    def message_bytes_max(self) -> int:
        """The largest payload the broker takes."""
        ...


# --- data plane: requests --------------------------------------------------------------------


class RequestService(Protocol):
    """What the worker offers to whatever request plane brings it envelopes."""

    def admit(self, envelope: Envelope, payload: bytes) -> Ack:
        """Decide without waiting. Once `accepted`, the work is started and will call home."""
        ...

    async def answer(self, envelope: Envelope, payload: bytes) -> bytes:
        """Run a unary request and return its encoded result; raises a `TrinamoError`."""
        ...

    def cancel(self, request_id: str) -> None:
        """The caller wants no answer any more; also if the request has not arrived yet."""
        ...


class RequestServer(Protocol):
    """The worker's end of a request plane."""

    @property
    def transport(self) -> str:
        """The key of `address` in an instance's `transports`, such as `tcp` or `nats`."""
        ...

    @property
    def address(self) -> str:
        """What callers must know to reach it; valid once `serve` has started."""
        ...

    async def serve(
        self,
        service: RequestService,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept envelopes until cancelled; started once `address` is reachable."""
        ...


class RequestPlane(Protocol):
    """The caller's end: one envelope to one instance, one typed answer."""

    @property
    def transport(self) -> str:
        """Which of an instance's `transports` this plane speaks."""
        ...

    async def send(self, address: str, envelope: Envelope, payload: bytes) -> Ack:
        """Deliver a streaming request and return the worker's ACK or NACK.

        Raises `ConnectError` if nothing was sent, `DisconnectedError` if the connection broke
        while waiting, `RemoteProtocolError` if the reply is neither. Cancelled while waiting, it
        has told the worker to forget the request.
        """
        ...

    async def call(self, address: str, envelope: Envelope, payload: bytes) -> bytes:
        """Deliver a unary request and return its encoded result; raises what the worker raised."""
        ...


# --- data plane: responses -------------------------------------------------------------------


class ResponseChannel(Protocol):
    """The caller's end of one response stream, after or before the worker's call."""

    @property
    def is_called(self) -> bool:
        """Whether the worker has called home."""
        ...

    async def wait_called(self) -> None:
        """Return once the worker has called home, or the stream has ended."""
        ...

    async def wait_prologue(self) -> None:
        """Return once the handler has started; raises what the prologue says went wrong."""
        ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> bytes:
        """The next item; ends after Sentinel, else raises the stream's one terminal error."""
        ...

    def fail(self, error: TrinamoError) -> None:
        """End the stream from this side with `error`, such as: the instance vanished."""
        ...


class Registration(AbstractContextManager["Registration"], Protocol):
    """A subject held open for one worker's call; leaving it removes the subject.

    Leaving it before the stream's terminal sends Kill without a checkpoint.
    """

    @property
    def connection(self) -> ConnectionInfo:
        """What the envelope tells the worker: address, subject and stream type."""
        ...

    @property
    def channel(self) -> ResponseChannel:
        """The stream itself."""
        ...


class RequestSender(Protocol):
    """The caller's end of one request stream: input items to the worker."""

    async def send(self, item: bytes) -> None:
        """Queue one input item, waiting while the byte bound is reached."""
        ...

    def finish(self) -> None:
        """Say that the input is complete (Sentinel)."""
        ...


class ResponsePlane(Protocol):
    """The caller's side: where workers call home."""

    def register(self, context: Context) -> Registration:
        """Open a subject for the response of one request; synchronous."""
        ...


class ResponseSender(Protocol):
    """The worker's end of one response stream, after it has called home."""

    def send_nowait(self, item: bytes) -> bool:
        """Queue one item; False once the byte bound is reached, then await `drain`.

        After a Kill items are dropped silently: the scope of the context is already cancelled.
        """
        ...

    async def drain(self) -> None:
        """Wait until the queue is below its bound."""
        ...

    def open(self) -> None:
        """Queue the prologue: the handler has started."""
        ...

    def refuse(self, error: TrinamoError) -> None:
        """Queue a prologue that says why there will be no item."""
        ...

    def finish(self) -> None:
        """Queue Sentinel: the answer is complete."""
        ...

    def fail(self, error: TrinamoError) -> None:
        """Queue `failed`: the handler raised after the prologue."""
        ...


class CallHome(Protocol):
    """The worker's side of the response plane."""

    def call_home(
        self, connection: ConnectionInfo, context: Context
    ) -> AbstractAsyncContextManager[ResponseSender]:
        """Dial the caller, greet, and hold the stream until all that is queued is sent.

        Stop and Kill from the caller, and its death, reach `context` while inside. Raises
        `ConnectError` if the caller cannot be reached, `RefusedError` if it refuses the subject.
        """
        ...

    def receive_input(
        self, connection: ConnectionInfo, context: Context
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Dial the caller for a request stream and iterate its input items."""
        ...


Value = Any
"""Anything msgspec can encode: what handlers receive and yield."""
