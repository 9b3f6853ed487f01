"""One life of the broker's process: who is connected, who wants what, and who gets it.

Interest dies with the process; streams (`jetstream.py`) are on the disk. A message goes to all who
are interested, of each group to one that the seed draws, in the order in which it came, at most once.
A client that leaves more unread than `pending_bytes_max` is cut off, as the real server does it, and
the trace says so.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from typing import Final

import attrs
import trio

from trinamo.runtime.errors import RemoteProtocolError

from ..interception import DelayLine, Done
from ..machine import ServiceMachine
from ..peer import StreamPeer
from .jetstream import JetStream
from .wire import (
    Connect,
    Deliver,
    Operation,
    OperationDecoder,
    Ping,
    Publish,
    Subscribe,
    Unknown,
    Unsubscribe,
    matches,
    status,
)

VERSION: Final = "2.10.0"
MESSAGE_BYTES_MAX: Final = 1 << 20
"""The largest payload with its headers."""
ROUTES_MAX: Final = 1024
"""Subjects whose receivers are remembered; those of answers are new each time."""


@attrs.define(eq=False)
class _Interest:
    """One subscription of one client."""

    client: _Client
    id: str
    tokens: list[str]
    group: str
    seen: int = 0
    seen_max: int = 0
    """After so many it ends; 0 for never."""


class Broker:
    """The process. `serve` is its listener's handler; `run` what it does by itself."""

    def __init__(
        self,
        machine: ServiceMachine,
        streams: JetStream,
        *,
        rng: random.Random,
        pending_bytes_max: int,
        forge: Callable[[Publish], list[Publish]],
    ) -> None:
        self._forge = forge
        self.machine, self.streams = machine, streams
        self.pending_bytes_max = pending_bytes_max
        self._rng = rng
        self._interests: dict[_Interest, None] = {}
        self._routes: dict[str, list[_Interest]] = {}
        self._client_count = 0

    async def serve(self, stream: trio.SocketStream) -> None:
        """Be the server of one client, until it is gone."""
        peer_name, _ = await trio.socket.getnameinfo(stream.socket.getpeername(), 0)
        self._client_count += 1
        async with trio.open_nursery() as nursery:
            client = _Client(self, stream, peer_name, nursery)
            client.greet(self._client_count)
            try:
                await client.run()
            finally:
                client.leave()
            nursery.cancel_scope.cancel()

    def add(self, interest: _Interest) -> None:
        """Deliver to it from now on."""
        self._interests[interest] = None
        self._routes.clear()

    def remove(self, interest: _Interest) -> None:
        """Deliver to it no more."""
        self._interests.pop(interest, None)
        self._routes.clear()

    def publish(self, message: Publish, sender: _Client) -> None:
        """Take in what a client says: a request of JetStream, a message for a stream, or for others."""
        for forged in self._forge(message):
            # Whoever forged it hears of no refusal.
            self.send(forged)
            if self.streams.takes(forged.subject) and not self.machine.is_leaderless:
                self.streams.take(forged, self.send)
        if self.streams.takes(message.subject):
            self.send(message)
            if self.machine.is_leaderless:
                # A stream between two leaders has no responder.
                sender.say_nobody(message)
            else:
                self.streams.take(message, self.send)
        elif not self.send(message):
            sender.say_nobody(message)

    def send(self, message: Publish, *, shown_as: str = "", op: str = "") -> bool:
        """Deliver to whoever is interested; whether anybody was.

        `shown_as` is the subject that the receiver reads, if another; `op` is the request whose
        answer this is, for whoever loses answers.
        """
        receivers = self._receivers(message.subject)
        if shown_as:
            message = attrs.evolve(message, subject=shown_as)
        groups: dict[str, list[_Interest]] = {}
        for interest in receivers:
            if interest.group:
                groups.setdefault(interest.group, []).append(interest)
            else:
                interest.client.deliver(interest, message, op)
        for members in groups.values():
            chosen = members[self._rng.randrange(len(members))]
            chosen.client.deliver(chosen, message, op)
        return bool(receivers)

    def _receivers(self, subject: str) -> list[_Interest]:
        found = self._routes.get(subject)
        if found is None:
            if len(self._routes) >= ROUTES_MAX:
                self._routes.clear()
            tokens = subject.split(".")
            found = [each for each in self._interests if matches(each.tokens, tokens)]
            self._routes[subject] = found
        return found


class _Client:
    """One client, as the process sees it."""

    def __init__(
        self, broker: Broker, stream: trio.SocketStream, name: str, nursery: trio.Nursery
    ) -> None:
        self._broker, self._name = broker, name
        self._peer = StreamPeer(stream)
        self._interests: dict[str, _Interest] = {}
        self._hears_of_nobody = False
        self._requests, self._replies = DelayLine(nursery), DelayLine(nursery)

    def greet(self, number: int) -> None:
        """Say who the server is; the server speaks first."""
        server = {"server_id": "SIM", "server_name": self._broker.machine.name, "version": VERSION}
        limits = {"proto": 1, "headers": True, "max_payload": MESSAGE_BYTES_MAX}
        info = server | limits | {"client_id": number, "jetstream": True}
        self._peer.send(b"INFO " + json.dumps(info).encode() + b"\r\n")

    async def run(self) -> None:
        """Do what the client says until it is gone."""
        decoder = OperationDecoder(payload_bytes_max=MESSAGE_BYTES_MAX)
        await self._peer.run(self._receive, decoder.feed)

    def leave(self) -> None:
        """Forget all that it wanted."""
        for interest in self._interests.values():
            self._broker.remove(interest)

    def say_nobody(self, message: Publish) -> None:
        """Tell who asked that nobody is there to answer, if it wants to know."""
        if message.reply and self._hears_of_nobody:
            self._broker.send(Publish(message.reply, head=status(503)))

    def deliver(self, interest: _Interest, message: Publish, op: str) -> None:
        """Send it to the client, as the rules for messages say."""
        delivery = Deliver(interest.id, message)
        interest.seen += 1
        if interest.seen == interest.seen_max:
            self._do(Unsubscribe(interest.id))
        self._broker.machine.interceptor.admit(
            self._replies,
            partial(self._send, delivery),
            channel="nats.reply",
            peer=self._name,
            payload=Done(op, delivery) if op else delivery,
            size=len(message.payload) + len(message.head),
        )

    def _send(self, delivery: Deliver) -> None:
        self._peer.send(delivery.encoded())
        waiting = self._peer.waiting_bytes
        if waiting > self._broker.pending_bytes_max and not self._peer.is_lost:
            self._broker.machine.world.note("nats.slow", client=self._name, waiting=waiting)
            self._peer.close()

    def _receive(self, operation: Operation) -> None:
        match operation:
            case Ping():
                self._peer.send(b"PONG\r\n")
            case Unknown(words):
                self._peer.send(f"-ERR '{words}'\r\n".encode())
                raise RemoteProtocolError(words)
            case _:
                self._broker.machine.interceptor.admit(
                    self._requests,
                    partial(self._do, operation),
                    channel="nats.request",
                    peer=self._name,
                    payload=operation,
                    size=len(operation.payload) if isinstance(operation, Publish) else 0,
                )

    def _do(self, operation: Operation) -> None:
        match operation:
            case Publish():
                self._broker.publish(operation, self)
            case Connect(options):
                self._hears_of_nobody = bool(options.get("no_responders"))
            case Subscribe(number, pattern, group):
                interest = _Interest(self, number, pattern.split("."), group)
                self._interests[number] = interest
                self._broker.add(interest)
            case Unsubscribe(number, count):
                known = self._interests.get(number)
                if known is not None and count > known.seen:
                    known.seen_max = count
                elif known is not None:
                    del self._interests[number]
                    self._broker.remove(known)
            case Ping() | Unknown():
                pass  # Done with as they come.
