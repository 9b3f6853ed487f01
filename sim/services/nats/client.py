"""The event plane over a simulated broker: `transports/nats`, on a connection of our own.

Subscriptions, requests, bounds and what waits for the broker are the production's. Only what nats-py
and the island do is done here: one connection that is dialled again, and the words on it. Work
queues are calls to the broker (`queue_client.py`), not streams of JetStream.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import trio
from typing_extensions import override

from trinamo.runtime.errors import ConnectError
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.planes import Message, QueueLimits, WorkQueue
from trinamo.runtime.protocol.streams.codec import Frame
from trinamo.transports.nats.outbox import Interest, Line, Publication
from trinamo.transports.nats.plane import NatsEventPlane

from ..connector import Connector
from ..peer import StreamPeer
from ..wire import (
    Deliver,
    Heartbeat,
    Pong,
    Publish,
    Subscribe,
    Unsubscribe,
    decode_from_broker,
    encode,
)
from .queue_client import BrokerCalls, open_queue
from .server import PORT

OUTGOING_BYTES_MAX: Final = 64 << 20


class SimulatedLine(Line):
    """The connection to a `SimulatedNats`. Implements `Session`."""

    def __init__(self, connector: Connector, caller: BrokerCalls, *, messages_max: int) -> None:
        super().__init__(messages_max=messages_max, bytes_max=OUTGOING_BYTES_MAX)
        self.opened_once = trio.Event()
        """Set with the first connection that knows all interests."""
        self._connector, self._caller = connector, caller
        self._ids = itertools.count()
        self._by_id: dict[int, Interest] = {}
        self._pongs: deque[Callable[[], None]] = deque()
        """What to do with each answer to a ping, in order."""
        self._full = trio.lowlevel.ParkingLot()

    async def run(self) -> None:
        """Keep the connection until cancelled."""
        async with open_nursery() as nursery:
            nursery.start_soon(self._wait_for_room)
            await self._connector.run(self)

    async def _wait_for_room(self) -> None:
        while True:
            await self._full.park()
            if self._connector.peer is not None:
                await self._connector.peer.wait_room()
            self.wake()

    @override
    def wake(self) -> None:
        peer = self._connector.peer
        while self.is_connected and peer is not None:
            if not peer.has_room:
                self._full.unpark_all()
                return
            item = self.outbox.take()
            match item:
                case Publication():
                    header = Publish(item.subject, item.reply, dict(item.headers))
                    peer.post(encode(header), bytes(item.payload))
                case Interest(is_wanted=True, handle=None):
                    self._subscribe(peer, item)
                    self._ping(peer, item.confirmed)
                case Interest(is_wanted=False, handle=int(number)):
                    item.handle = None
                    del self._by_id[number]
                    peer.post(encode(Unsubscribe(number)))
                case None:
                    return
                case _:
                    pass  # It was wanted and is not, or the other way round.

    def _subscribe(self, peer: StreamPeer, interest: Interest) -> None:
        number = interest.handle = next(self._ids)
        self._by_id[number] = interest
        peer.post(encode(Subscribe(number, interest.pattern, interest.group)))

    def _ping(self, peer: StreamPeer, call: Callable[[], None]) -> None:
        self._pongs.append(call)
        peer.post(encode(Heartbeat()))

    # --- the connection: Session -------------------------------------------------------------------

    def opened(self, peer: StreamPeer) -> None:
        """See `Session`. Interest first, so that the answers to what waited find us."""
        if missing := self.missing():
            for interest in missing:
                self._subscribe(peer, interest)
            self._ping(peer, lambda: self.opened(peer))
            return
        self.restored(f"simulated nats at {self._connector.where}")
        self.opened_once.set()
        self.wake()

    def unreached(self) -> None:
        """See `Session`. What waits goes on waiting."""
        self.last_error = self._connector.last_words

    def ping(self, peer: StreamPeer) -> None:
        """See `Session`."""
        self._ping(peer, lambda: None)

    def lost(self) -> None:
        """See `Session`."""
        self.last_error = "the connection was lost"
        self.forget()
        self._by_id.clear()
        self._pongs.clear()
        self._caller.lost()

    def received(self, frame: Frame) -> None:
        """See `Session`."""
        header, data = frame
        message = decode_from_broker(header)
        if isinstance(message, Deliver):
            interest = self._by_id.get(message.id)
            if interest is not None:
                interest.deliver(Message(message.subject, data, message.reply, message.headers))
        elif not isinstance(message, Pong):
            self._caller.receive(message, data)
        elif self._pongs:
            self._pongs.popleft()()


class SimulatedEventPlane(NatsEventPlane):
    """The production's plane on a `SimulatedLine`, with work queues of the simulated broker."""

    def __init__(
        self, line: SimulatedLine, caller: BrokerCalls, *, inbox: str, rng: random.Random
    ) -> None:
        super().__init__(line, inbox=inbox, rng=rng)
        self._caller = caller
        self._call_ids = (f"{inbox}.{number}" for number in itertools.count(1))

    @asynccontextmanager
    @override
    async def work_queue(
        self, name: str, *, limits: QueueLimits | None = None
    ) -> AsyncIterator[WorkQueue]:
        async with open_queue(
            self._caller,
            name,
            limits,
            payload_bytes_max=self.message_bytes_max,
            call_ids=self._call_ids,
        ) as queue:
            yield queue

    @override
    async def work_queue_names(self) -> list[str]:
        names: list[str] = (await self._caller.call("names", (), list[str]))[0]
        return names


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
    """
    connector = Connector(
        host,
        port,
        rng=rng,
        dial_timeout_s=connect_timeout_s,
        pause_max_s=reconnect_pause_max_s,
        silence_s=silence_s,
    )
    caller = BrokerCalls(connector)
    line = SimulatedLine(connector, caller, messages_max=buffered_max)
    plane = SimulatedEventPlane(line, caller, inbox=f"_INBOX.{rng.getrandbits(128):032x}", rng=rng)
    async with open_nursery() as nursery:
        nursery.start_soon(line.run)
        try:
            with trio.move_on_after(connect_timeout_s) as scope:
                await line.opened_once.wait()
            if scope.cancelled_caught:
                raise ConnectError(connector.last_words)
            yield plane
        finally:
            plane.close()
            nursery.cancel_scope.cancel()
