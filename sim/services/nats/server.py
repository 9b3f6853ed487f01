"""A message broker as a host of the world: the memory broker and its queues behind messages.

`SimulatedNats` is the machine. Routing is that of `transports/memory/events.py` and queues are the
model of `runtime/protocol/queue/work_queue.py`: one model of each. Subscriptions die with the
process, queues are on its disk. Whoever wants a plane opens `open_simulated_nats` of `client.py`.

Messages are delivered at most once. A client that does not read fast enough loses what exceeds
`pending_max` per subscription, here and not at its end, and the trace says so. Faults: `kill`,
`power_off`, `pause` and `resume`, `restart` with the disk or without, `refuse` (the queues have no
leader; plain messages go on), `lose_replies`, `clock` (visibility timeouts are measured on it), and
`interceptor.rules` for single messages.

What this module does not do: replicate, or keep streams other than work queues.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import trio
from typing_extensions import override

from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.planes import Message
from trinamo.transports.memory.events import MemoryBroker, MemorySubscription

from ...core.world import World
from ..interception import Done
from ..machine import Connection, ServiceMachine
from ..wire import (
    Call,
    CallResult,
    Deliver,
    Forget,
    FromClient,
    Heartbeat,
    NoLeader,
    Publish,
    Refusal,
    Reply,
    Subscribe,
    Unsubscribe,
    decode_from_client,
    encode,
)
from .queues import CALLS, QueueShelf, Take

PORT: Final = 4222
_MESSAGE_BYTES_MAX: Final = 1 << 20
"""The largest payload with its headers."""


class SimulatedNats(ServiceMachine):
    """The broker's machine. `boot` starts it; needs a `Network` on the same world.

    Args:
        world: Whose host it is.
        name: The host's name.
        port: Where it listens.
        pending_max: How many messages wait for one subscription of a slow client.
    """

    def __init__(
        self,
        world: World,
        *,
        name: str = "nats",
        port: int = PORT,
        pending_max: int = 65_536,
    ) -> None:
        self._stirred = trio.lowlevel.ParkingLot()
        super().__init__(world, name, on_clock=self._stirred.unpark_all, losable=CALLS)
        self.port = port
        self.pending_max = pending_max
        self.message_bytes_max = _MESSAGE_BYTES_MAX
        self.queues = QueueShelf(self.clock)
        self.broker = MemoryBroker(message_bytes_max=_MESSAGE_BYTES_MAX)

    # --- the machine -----------------------------------------------------------------------------

    def boot(self) -> None:
        """Start the process: nobody is subscribed, queues are what is on the disk."""
        self.broker = MemoryBroker(message_bytes_max=self.message_bytes_max)
        self.queues.forget_takes()
        self.interceptor.forget()
        self.world.boot(self.name, self._main)

    def _empty_disk(self) -> None:
        self.queues = QueueShelf(self.clock)

    def _elected(self) -> None:
        self._stirred.unpark_all()

    # --- the process -----------------------------------------------------------------------------

    async def _main(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._feed_takers, name="queues")
            nursery.start_soon(partial(trio.serve_tcp, self._serve, self.port), name="listener")

    async def _serve(self, stream: trio.SocketStream) -> None:
        peer_name, _ = await trio.socket.getnameinfo(stream.socket.getpeername(), 0)
        async with trio.open_nursery() as nursery:
            connection = _Connection(self, stream, peer_name, nursery)
            with connection.interests:
                try:
                    await connection.peer.run(connection.receive)
                finally:
                    self.queues.drop_takes(connection)
                nursery.cancel_scope.cancel()

    async def _feed_takers(self) -> None:
        while True:
            due = math.inf
            if not self.is_leaderless:  # Else whoever is elected stirs.
                for take, job in self.queues.feed():
                    take.asker.reply(take.op, CallResult(take.id), encode(job))
                due = self.queues.next_due()
            with trio.move_on_at(self.clock.world_time(due)):
                await self._stirred.park()

    def answer(self, call: Call, data: bytes, asker: _Connection) -> tuple[Reply, bytes] | None:
        """Do a call to a queue, and say what to answer; None if the answer comes later."""
        if self.is_leaderless:
            return NoLeader(call.id), b""
        try:
            if call.op == "take":
                self.queues.ask(Take.decode(call, data, asker))
                result: Any = None
            else:
                result = self.queues.do(call.op, data)
        except TrinamoError as error:
            return Refusal(call.id, error.code, error.message), b""
        self._stirred.unpark_all()
        if call.op == "take":
            return None
        self.world.note(f"nats.{call.op}")
        return CallResult(call.id), encode(result)


class _Connection(Connection):
    """One client, as the process sees it. `interests` holds its subscriptions."""

    def __init__(
        self, nats: SimulatedNats, stream: trio.SocketStream, client: str, nursery: trio.Nursery
    ) -> None:
        super().__init__(nats, stream, client, nursery, service="nats", read=decode_from_client)
        self.interests = ExitStack()
        self._nats, self._nursery = nats, nursery
        self._subscriptions: dict[int, ExitStack] = {}
        self.interests.callback(self._leave_all)

    def _leave_all(self) -> None:
        for subscription in self._subscriptions.values():
            subscription.close()

    @override
    def _do(self, message: FromClient, data: bytes) -> None:
        match message:
            case Publish(subject, reply, headers):
                self._nats.broker.route(Message(subject, data, reply, headers))
            case Subscribe():
                self._subscribe(message)
            case Unsubscribe(subscription_id):
                self._subscriptions.pop(subscription_id, ExitStack()).close()
            case Call():
                answer = self._nats.answer(message, data, self)
                if answer is not None:
                    self.reply(message.op, *answer)
            case Forget(call_id):
                self._nats.queues.drop_takes(self, call_id)
            case Heartbeat():
                pass

    def _subscribe(self, wanted: Subscribe) -> None:
        if wanted.id in self._subscriptions:
            return
        # Entered at once, so that what this client publishes next reaches it.
        held = self._subscriptions[wanted.id] = ExitStack()
        subscription = held.enter_context(
            self._nats.broker.attach(
                wanted.pattern, group=wanted.group, pending_max=self._nats.pending_max
            )
        )
        self._nursery.start_soon(self._forward, wanted.id, subscription, name="subscription")

    async def _forward(self, subscription_id: int, subscription: MemorySubscription) -> None:
        dropped = 0
        async for message in subscription:
            header = encode(
                Deliver(subscription_id, message.subject, message.reply, dict(message.headers))
            )
            self._send(header, message.payload, message)
            if subscription.dropped > dropped:
                dropped = subscription.dropped
                self._nats.world.note("nats.slow", client=self.client, dropped=dropped)
            await self.peer.wait_room()

    def reply(self, op: str, reply: Reply, data: bytes = b"") -> None:
        """Answer a call."""
        self._send(encode(reply), data, Done(op, reply))
