"""The event plane over a simulated broker: `EventPlane`, with the manners of `transports/nats`.

Messages go at most once: what was on its way when the connection broke is lost. While the broker is
away publishes wait in a bounded buffer, subscriptions are kept and made again, a request waits for
the broker within its time. Work queues are in `queue_client.py`.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

import attrs
import trio

from trinamo.runtime.errors import (
    ConnectError,
    DeadlineError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from trinamo.runtime.planes import Message, QueueLimits
from trinamo.runtime.protocol.streams.codec import Frame
from trinamo.transports.memory.events import MemorySubscription
from trinamo.transports.memory.subjects import check_pattern, check_subject

from ..calls import Caller
from ..connector import Connector, running
from ..peer import Peer
from ..wire import Ping, Pong, encode
from .queue_client import SimulatedWorkQueue, open_queue
from .server import PORT
from .wire import Deliver, Publish, Subscribe, Unsubscribe, decode_from_broker

__all__ = ["SimulatedEventPlane", "open_simulated_nats"]

MESSAGE_BYTES_MAX: Final = 1 << 20
HEALTH_TIMEOUT_S: Final = 2.0
INBOX_ID: Final = 0
"""The subscription to the replies to this plane's requests."""
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


@attrs.define(eq=False)
class _Interest:
    """One subscription of ours, made again on every connection."""

    subscription: MemorySubscription

    def greeting(self, subscription_id: int) -> bytes:
        return encode(
            Subscribe(subscription_id, self.subscription.pattern, self.subscription.group)
        )


@attrs.frozen(eq=False)
class _Publication:
    """A message that waits for the broker to return."""

    header: bytes
    payload: bytes


@attrs.define(eq=False)
class _Request:
    """A request whose reply is awaited."""

    replied: trio.Event = attrs.field(factory=trio.Event)
    reply: Message | None = None


class SimulatedEventPlane:
    """One process's connection to a `SimulatedNats`. Made by `open_simulated_nats`."""

    def __init__(
        self, connector: Connector, caller: Caller, *, inbox: str, buffered_max: int
    ) -> None:
        self.dropped = 0
        """How many messages were refused because the buffer was full."""
        self._connector, self._caller = connector, caller
        self._inbox = inbox
        self._is_publishing = False
        """Whether anything was published since the broker was last heard."""
        self._buffered_max = buffered_max
        self._interests: dict[int, _Interest] = {}
        self._subscription_ids = itertools.count(INBOX_ID + 1)
        self._requests: dict[str, _Request] = {}
        self._request_numbers = itertools.count(1)
        self._call_ids = (f"{inbox}.{number}" for number in itertools.count(1))
        self._waiting: deque[_Publication] = deque()
        self._pings: deque[trio.Event] = deque()

    @property
    def message_bytes_max(self) -> int:
        """The largest payload, with its headers, that the broker takes."""
        return MESSAGE_BYTES_MAX

    # --- EventPlane --------------------------------------------------------------------------------

    async def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] = {}
    ) -> None:
        """See `EventPlane.publish`. Waits for a connection that is slow; cancelled, it sent nothing."""
        check_subject(subject)
        if reply:
            check_subject(reply)
        _check_size(payload, headers)
        await trio.lowlevel.checkpoint()
        if self._connector.peer is not None:
            await self._connector.peer.wait_room()
        self._send(Publish(subject, reply, dict(headers)), payload)

    @asynccontextmanager
    async def subscribe(
        self, subject: str, *, group: str = "", pending_max: int = 4096
    ) -> AsyncIterator[MemorySubscription]:
        """See `EventPlane.subscribe`. Returns once the broker knows, or is found to be away."""
        check_pattern(subject)
        subscription_id = next(self._subscription_ids)
        interest = _Interest(MemorySubscription(subject, group, pending_max))
        self._interests[subscription_id] = interest
        self._connector.expect()
        try:
            await trio.lowlevel.checkpoint()
            if self._connector.peer is not None:
                self._connector.peer.post(interest.greeting(subscription_id))
                await self._round_trip(self._connector.peer)
            yield interest.subscription
        finally:
            del self._interests[subscription_id]
            interest.subscription.close()
            if self._connector.peer is not None:
                self._connector.peer.post(encode(Unsubscribe(subscription_id)))

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> Message:
        """See `EventPlane.request`. Definite at its deadline only if it never left."""
        check_subject(subject)
        _check_size(payload, {})
        await trio.lowlevel.checkpoint()
        inbox = f"{self._inbox}.{next(self._request_numbers)}"
        request = self._requests[inbox] = _Request()
        self._connector.expect()
        waiting = None
        try:
            waiting = self._send(Publish(subject, inbox, {}), payload)
            with trio.move_on_after(timeout_s):
                await request.replied.wait()
        finally:
            del self._requests[inbox]
            # Nobody waits for the answer of a request that has not left yet.
            was_recalled = waiting is not None and waiting in self._waiting
            if waiting is not None and was_recalled:
                self._waiting.remove(waiting)
        if request.reply is None:
            raise DeadlineError(
                f"no reply on {subject} within {timeout_s:g} s", definite=was_recalled
            )
        if not request.reply.payload and request.reply.headers.get("Status") == "503":
            raise UnavailableError(f"nobody is subscribed to {subject}")
        return request.reply

    def work_queue(
        self, name: str, *, limits: QueueLimits | None = None
    ) -> AbstractAsyncContextManager[SimulatedWorkQueue]:
        """See `EventPlane.work_queue`."""
        return open_queue(
            self._caller,
            name,
            limits,
            payload_bytes_max=self.message_bytes_max,
            call_ids=self._call_ids,
        )

    async def work_queue_names(self) -> list[str]:
        """See `EventPlane.work_queue_names`."""
        names: list[str] = await self._caller.read("names", (), list[str])
        return names

    async def check_health(self) -> str:
        """One line about the broker; raises `ConnectError` if it is away or silent."""
        await trio.lowlevel.checkpoint()
        peer = self._connector.peer
        if peer is None:
            raise ConnectError(self._connector.last_words)
        with trio.move_on_after(HEALTH_TIMEOUT_S):
            await self._round_trip(peer)
            if not peer.is_lost:
                return f"simulated nats at {self._connector.where}"
        raise ConnectError(f"{self._connector.where} does not answer")

    async def run(self) -> None:
        """Keep the connection until cancelled; `open_simulated_nats` does."""
        await self._connector.run(self)

    # --- inside --------------------------------------------------------------------------------

    def _send(self, message: Publish, payload: bytes) -> _Publication | None:
        """Send now, or keep for later: then what is kept."""
        header, data = encode(message), bytes(payload)
        if self._connector.peer is not None:
            self._is_publishing = True
            self._connector.expect()
            self._connector.peer.post(header, data)
            return None
        if len(self._waiting) >= self._buffered_max:
            self.dropped += 1
            raise OverloadedError(
                f"the broker is away and {len(self._waiting)} messages wait for it",
                bound="buffered_max",
                value=self._buffered_max,
            )
        publication = _Publication(header, data)
        self._waiting.append(publication)
        return publication

    async def _round_trip(self, peer: Peer) -> None:
        """Return once the broker has seen all that was sent before, or the connection is lost."""
        answered = trio.Event()
        self._pings.append(answered)
        self._connector.expect()
        peer.post(encode(Ping()))
        await answered.wait()

    # --- the connection: Session -------------------------------------------------------------------

    def opened(self, peer: Peer) -> None:
        """See `Session`. Interest first, so that the answers to what waited find us."""
        peer.post(encode(Subscribe(INBOX_ID, f"{self._inbox}.*", "")))
        for subscription_id, interest in self._interests.items():
            peer.post(interest.greeting(subscription_id))
        while self._waiting:
            publication = self._waiting.popleft()
            peer.post(publication.header, publication.payload)

    @property
    def is_expectant(self) -> bool:
        """See `Session`. What was published may be lost unseen, so that is asked about, too."""
        waits = self._interests or self._requests or self._pings or self._is_publishing
        return bool(waits) or self._caller.is_waiting

    def unreached(self) -> None:
        """See `Session`. Whatever waits goes on waiting."""

    def ping(self, peer: Peer) -> None:
        """See `Session`."""
        self._pings.append(trio.Event())
        peer.post(encode(Ping()))

    def lost(self) -> None:
        """See `Session`."""
        self._caller.lost()
        while self._pings:
            self._pings.popleft().set()

    def received(self, frame: Frame) -> None:
        """See `Session`."""
        header, data = frame
        self._is_publishing = False
        message = decode_from_broker(header)
        if isinstance(message, Deliver):
            self._deliver(
                message.id, Message(message.subject, data, message.reply, message.headers)
            )
        elif isinstance(message, Pong):
            if self._pings:
                self._pings.popleft().set()
        else:
            self._caller.receive(message, data)

    def _deliver(self, subscription_id: int, message: Message) -> None:
        if subscription_id == INBOX_ID:
            request = self._requests.get(message.subject)
            # A late reply reaches nobody.
            if request is not None and not request.replied.is_set():
                request.reply = message
                request.replied.set()
            return
        interest = self._interests.get(subscription_id)
        if interest is not None:
            interest.subscription.deliver(trio.current_time(), message)


def _check_size(payload: bytes, headers: Mapping[str, str]) -> None:
    size = len(payload)
    for name, value in headers.items():
        if _HEADER_NAME.fullmatch(name) is None or "\r" in value or "\n" in value:
            raise RequestError(f"not a header: {name!r}: {value!r}", param="headers")
        size += len(name.encode()) + len(value.encode())
    if size > MESSAGE_BYTES_MAX:
        raise RequestError(
            f"message of {size} bytes; the broker takes {MESSAGE_BYTES_MAX}", param="payload"
        )


@asynccontextmanager
async def open_simulated_nats(
    host: str = "nats",
    port: int = PORT,
    *,
    rng: random.Random,
    buffered_max: int = 65_536,
    connect_timeout_s: float = 2.0,
    reconnect_pause_max_s: float = 1.0,
    silence_s: float = 10.0,
    asks_idly: bool = True,
) -> AsyncIterator[SimulatedEventPlane]:
    """Connect to the broker on `host`, from the running task's host, and hold the connection.

    Args:
        host: The broker's host.
        port: Where it listens.
        rng: Dice for the inbox's name and for pauses: the environment's.
        buffered_max: How many messages wait while the broker is away.
        connect_timeout_s: How long opening waits for the broker; `ConnectError` after that.
        reconnect_pause_max_s: The longest pause between two tries to connect, before jitter.
        silence_s: When a connection that says nothing is given up for a new one.
        asks_idly: Ask a silent connection also while nobody waits for anything.
    """
    connector = Connector(
        host,
        port,
        rng=rng,
        dial_timeout_s=connect_timeout_s,
        pause_max_s=reconnect_pause_max_s,
        silence_s=silence_s,
        asks_idly=asks_idly,
    )
    caller = Caller(connector, timeout_s=10.0, per_try_timeout_s=1.0, knows_no_leader=True)
    inbox = f"_INBOX.{rng.getrandbits(128):032x}"
    plane = SimulatedEventPlane(connector, caller, inbox=inbox, buffered_max=buffered_max)
    async with running(plane.run):
        with trio.move_on_after(connect_timeout_s) as scope:
            await connector.wait_open()
        if scope.cancelled_caught:
            raise ConnectError(connector.last_words)
        yield plane
