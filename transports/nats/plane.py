"""The event plane over NATS: what the runtime sees of a connection.

Messages are at most once: those that were with the connection when it broke are gone. Publishing
and receiving are plain calls to the island that runs nats-py (`island.py`).
Work queues on JetStream are in `nats/queue/work_queue.py`.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

import attrs
import trio

from trinamo.runtime.config.planes import NatsConfig, need_servers
from trinamo.runtime.env import Env, RealEnv
from trinamo.runtime.errors import ConfigError, ConnectError, DeadlineError, UnavailableError
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.planes import EventStatistics, Message, QueueLimits, WorkQueue
from trinamo.runtime.planes.events import check_message, check_pattern
from trinamo.transports.security.sealing import Sealer

from .outbox import Interest, Publication
from .queue.streams import list_work_queues, try_write
from .queue.work_queue import open_work_queue

if TYPE_CHECKING:
    from .island import Island

YIELD_EVERY = 16


@attrs.define(eq=False)
class _Call:
    accept: Callable[[Message], bool] | None
    answered: trio.Event = attrs.field(factory=trio.Event)
    reply: Message | None = None


class NatsSubscription:
    """The receiving end of one subscription. Iteration ends once it is left and empty."""

    def __init__(self, pending_max: int) -> None:
        self.dropped = 0
        """How many messages found `pending_max` others waiting and were dropped."""
        self._send, self._receive = trio.open_memory_channel[Message](pending_max)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """The next message; a receive that is cancelled loses none."""
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def deliver(self, message: Message) -> None:
        """Queue a message, or count it as dropped; synchronous."""
        try:
            self._send.send_nowait(message)
        except trio.WouldBlock:
            self.dropped += 1
        except trio.ClosedResourceError:
            pass  # Left a moment ago.

    def close(self) -> None:
        """No more messages: readers get what is pending, then the end."""
        self._send.close()


class NatsEventPlane:
    """An open connection to NATS; made by `open_nats`."""

    def __init__(
        self, island: Island, *, inbox: str, env: Env, sealer: Sealer, stream_replicas: int = 1
    ) -> None:
        self._island = island
        self._sealer = sealer
        self._inbox = inbox
        self._calls: dict[str, _Call] = {}
        self._call_count = 0
        self._publish_count = 0
        self._queue_count = 0
        self._env = env
        self._stream_replicas = stream_replicas
        self._subscriptions: dict[NatsSubscription, None] = {}
        self._dropped_before = 0
        self._is_closed = False
        # Nobody waits for the inbox: it is subscribed before the connection counts as open.
        island.add(Interest(f"{inbox}.*", "", self._on_reply, lambda: None))

    @property
    def message_bytes_max(self) -> int:
        """The server's `max_payload`: the largest payload with its headers."""
        return self._island.message_bytes_max

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection right now, as far as is known."""
        return self._island.is_connected

    def statistics(self) -> EventStatistics:
        return EventStatistics(
            is_connected=self._island.is_connected,
            connections=self._island.connection_count,
            waiting_messages=self._island.outbox.message_count,
            dropped_outgoing=self._island.outbox.dropped,
            dropped_incoming=self._dropped_before
            + sum(subscription.dropped for subscription in self._subscriptions),
            refused_incoming=self._sealer.refused,
        )

    async def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] = {}
    ) -> None:
        """Send and forget. Cancelled, it has sent nothing.

        Raises `RequestError` for a bad subject, header or size, `OverloadedError` when the buffer
        is full, `ConnectError` after the plane was closed.
        """
        self._publish_count += 1
        if self._publish_count % YIELD_EVERY:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            # A full turn of the scheduler costs more than the publish itself; every so often is
            # enough to keep a tight loop from starving everyone else.
            await trio.lowlevel.checkpoint()
        self._put(subject, payload, reply, headers)

    @asynccontextmanager
    async def subscribe(
        self, subject: str, *, group: str = "", pending_max: int = 4096
    ) -> AsyncIterator[NatsSubscription]:
        """Receive what is published from now on; one member per message within a `group`.

        Entered once the server has confirmed it. While the server is away it is entered at once,
        and takes effect when it is back.
        """
        check_pattern(subject, group)
        self._check_open()
        subscription = NatsSubscription(pending_max)
        confirmed = trio.Event()
        interest = Interest(subject, group, subscription.deliver, confirmed.set)
        self._subscriptions[subscription] = None
        self._island.add(interest)
        try:
            if self._island.is_connected:
                await confirmed.wait()
            else:
                await trio.lowlevel.checkpoint()
            yield subscription
        finally:
            self._island.remove(interest)
            del self._subscriptions[subscription]
            self._dropped_before += subscription.dropped
            subscription.close()

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] = {},
        accept: Callable[[Message], bool] | None = None,
    ) -> Message:
        """See `EventPlane.request`; a `DeadlineError` is definite if it never left, and never will."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._call_count += 1
        token = f"{self._call_count:x}"
        call = self._calls[token] = _Call(accept)
        was_withdrawn = False
        try:
            publication = self._put(subject, payload, f"{self._inbox}.{token}", headers)
            try:
                with trio.move_on_after(timeout_s):
                    await call.answered.wait()
            finally:
                # Nobody waits for the answer of a request that has not left yet.
                was_withdrawn = self._island.outbox.withdraw(publication)
        finally:
            del self._calls[token]
        if call.reply is not None:
            if call.reply.says_nobody:
                raise UnavailableError(f"nobody is subscribed to {subject}")
            return call.reply
        self._check_open()
        raise DeadlineError(f"no reply on {subject} within {timeout_s:g} s", definite=was_withdrawn)

    @asynccontextmanager
    async def work_queue(
        self, name: str, *, limits: QueueLimits | None = None
    ) -> AsyncIterator[WorkQueue]:
        """Open a queue on JetStream; with `limits` it is made, or changed to have them."""
        self._check_open()
        self._queue_count += 1
        async with open_work_queue(
            self,
            name,
            limits=limits,
            replicas=self._stream_replicas,
            inbox=f"{self._inbox}-{self._queue_count:x}",
            env=self._env,
            sealer=self._sealer,
        ) as queue:
            yield queue

    async def work_queue_names(self) -> list[str]:
        self._check_open()
        return await list_work_queues(self, rng=self._env.rng)

    async def try_write(self) -> None:
        """Store a message on the server's disk as a queue would; see `try_write` for what it raises."""
        self._check_open()
        await try_write(self, self._stream_replicas, rng=self._env.rng)

    async def check_health(self) -> str:
        """One line about the server, `WITHOUT_JETSTREAM` if it is; raises `ConnectError` if it is not connected."""
        await trio.lowlevel.checkpoint()
        self._check_open()
        if not self._island.is_connected:
            raise ConnectError(f"not connected to NATS: {self._island.last_error}")
        return self._island.server

    def close(self) -> None:
        """End every subscription and every waiting request; `open_nats` calls it on leaving."""
        self._is_closed = True
        for subscription in self._subscriptions:
            subscription.close()
        for call in self._calls.values():
            call.answered.set()

    def _put(
        self, subject: str, payload: bytes, reply: str, headers: Mapping[str, str]
    ) -> Publication:
        self._check_open()
        bytes_max = self._island.message_bytes_max
        size = check_message(subject, payload, reply, headers, bytes_max=bytes_max)
        publication = Publication(subject, payload, reply, dict(headers), size)
        self._island.outbox.put(publication)
        self._island.wake()
        return publication

    def _on_reply(self, message: Message) -> None:
        call = self._calls.get(message.subject.rpartition(".")[2])
        # None: an answer after the deadline. Already answered: a second responder.
        if call is None or call.reply is not None:
            return
        if call.accept is None or call.accept(message):
            call.reply = message
            call.answered.set()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConnectError("this connection to NATS was closed")


@asynccontextmanager
async def open_nats(
    servers: str | Sequence[str],
    section: NatsConfig = NatsConfig(),  # noqa: B008 -- frozen
    *,
    tls: ssl.SSLContext | None = None,
    env: Env | None = None,
    sealer: Sealer | None = None,
) -> AsyncIterator[NatsEventPlane]:
    """Connect to one of `servers` (`nats://host:port`, `tls://…`) and hold the connection.

    Everything else is as the section `event_plane.nats` says; `tls` is used instead of its own. `sealer`
    seals the jobs of work queues; without one they go as they are.
    Opening tries each server, `connect_timeout_s` each, again and again for `start_timeout_s`. It raises
    `ConnectError` if none answers, or at once if one that answers refuses, and `ConfigError` if an option is wrong
    or needs a package that is missing.
    Once open, it reconnects for ever; meanwhile up to `outgoing_messages_max` messages and
    64 MiB wait. A server that leaves two pings unanswered counts as gone.

    With `tls`, or an address of `tls://`, a server that offers no TLS is sent nothing, not even a
    greeting: opening raises `ConnectError`, and later the plane stays away.

    Leaving, also by cancellation, takes at most `drain_timeout_s` and a second. Several planes may
    be open in one process.
    """
    # nats-py brings asyncio along, which nobody pays for who only simulates.
    from .island import Island, NatsOptions, tls_context  # noqa: PLC0415

    addresses = (servers,) if isinstance(servers, str) else tuple(servers)
    if not addresses:
        raise ConfigError("no NATS server is given")
    try:
        need_servers(addresses)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    env = env or RealEnv()
    options = NatsOptions(addresses, section, tls or tls_context(section.tls))
    island = Island(options, rng=env.rng)
    plane = NatsEventPlane(
        island,
        inbox=f"_INBOX.{env.rng.getrandbits(128):032x}",
        env=env,
        sealer=sealer or Sealer([], env.rng),
        stream_replicas=section.stream_replicas,
    )
    async with open_nursery() as nursery:
        nursery.start_soon(island.run)
        try:
            await island.wait_open()
            yield plane
        finally:
            plane.close()
            island.close()
