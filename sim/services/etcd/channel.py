"""The control plane over a simulated store: `transports/etcd`, on a channel of our own.

Watches, leases, deadlines and repetition are the production's. Only what gRPC does is done here: it
holds one connection and dials it again, and it ends calls and streams with a status. As gRPC does,
it fails them at once while the store cannot be reached, and lets them wait before that is known.

It gives up a connection on which nothing was heard for `silence_s`, having asked half-way, because
a frozen server or a cut link sends no FIN. Pauses between tries grow and are jittered, so that the
clients of a server that returns do not all come at once.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import trio

from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.streams.codec import Frame
from trinamo.transports.etcd.client import EtcdClient
from trinamo.transports.etcd.control import EtcdControlPlane, open_plane
from trinamo.transports.etcd.rpc import METHODS, Metadata, StatusError, StreamLostError

from ..peer import StreamPeer
from .server import PORT
from .wire import Call, CallResult, Forget, Heartbeat, Pong, Refusal, encode, reader

KEEP_ALIVE_S: Final = 8.0
"""gRPC, as `transports/etcd/bridge.py` sets it up, pings after six seconds and waits two."""
PAUSE_MIN_S: Final = 0.05
PAUSE_MAX_S: Final = 1.0
"""Between two tries to connect, before jitter."""

REQUESTS_MAX: Final = 10_000
REPLIES_MAX: Final = 10_000
"""How much waits for a connection, and for a reader."""
_read = reader(CallResult | Refusal | Pong)


class _Exchange:
    """One call or stream: requests there, replies back. Implements `Stream`."""

    def __init__(self, call: Call, channel: SimulatedChannel, *, waits: bool) -> None:
        self._head, self._method = encode(call), METHODS[call.op]
        self._channel = channel
        self.waits = waits
        """Until there is a connection, in the place of failing while there is none."""
        self._requests: list[bytes] = []
        self._replies: list[Any] = []
        self._came = trio.lowlevel.ParkingLot()
        self._error: StatusError | None = None

    def send_nowait(self, *requests: Any) -> None:
        """See `Stream.send_nowait`."""
        if len(self._requests) >= REQUESTS_MAX:
            raise StreamLostError(f"{REQUESTS_MAX} requests are waiting to be sent")
        self._requests += [request.SerializeToString() for request in requests]
        if self._channel.peer is not None:
            self.opened(self._channel.peer)
        elif self._channel.is_failing:
            self.unreached()

    async def replies(self) -> list[Any]:
        """Those that are there, at least one, or `StatusError`."""
        while not self._replies:
            if self._error is not None:
                raise self._error
            await self._came.park()
        replies, self._replies = self._replies, []
        return replies

    async def receive(self) -> list[Any]:
        """See `Stream.receive`."""
        try:
            return await self.replies()
        except StatusError as error:
            raise StreamLostError(error.text, error) from None

    def cancel(self) -> None:
        """See `Stream.cancel`."""
        self.end(StatusError("CANCELLED", "cancelled"))

    def opened(self, peer: StreamPeer) -> None:
        """There is a connection: what waited for it goes."""
        if self._requests:
            peer.post_all(self._head, self._requests)
            self._requests.clear()

    def received(self, data: bytes) -> None:
        """A reply came. More than anybody reads end the stream; gRPC would stop reading."""
        if len(self._replies) >= REPLIES_MAX:
            self.end(StatusError("RESOURCE_EXHAUSTED", f"{REPLIES_MAX} replies were not read"))
            return
        self._replies.append(self._method.reply.FromString(data))
        self._came.unpark_all()

    def unreached(self) -> None:
        """The store cannot be reached for now."""
        if self.waits:
            return
        why = f"failed to connect to all addresses; last error: {self._channel.last_words}"
        self.end(StatusError("UNAVAILABLE", why))

    def end(self, error: StatusError) -> None:
        """No reply comes any more."""
        if self._error is None:
            self._error = error
            self._came.unpark_all()


class SimulatedChannel:
    """Calls and streams over one connection that comes and goes. Implements `Channel`.

    Args:
        host: The service's host.
        port: Where it listens.
        rng: Dice for the jitter: the environment's.
        dial_timeout_s: The bound on one try to connect.
        silence_s: When a connection that says nothing is given up.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        rng: random.Random,
        dial_timeout_s: float = 1.0,
        silence_s: float = KEEP_ALIVE_S,
    ) -> None:
        self.where = f"{host}:{port}"
        self.peer: StreamPeer | None = None
        self.last_words = "no connection was tried yet"
        """Why there is no connection."""
        self.is_failing = False
        """Whether the last try to connect failed."""
        self._host, self._port = host, port
        self._rng = rng
        self._dial_timeout_s = dial_timeout_s
        self._silence_s = silence_s
        self._alarm = trio.CancelScope()
        """Round the sleep of whoever listens for silence."""
        self._exchanges: dict[int, _Exchange] = {}
        self._ids = itertools.count(1)

    async def call(
        self,
        name: str,
        request: Any,
        *,
        timeout_s: float,
        metadata: Metadata,  # noqa: ARG002 -- nobody is asked for a token
        waits: bool = False,
    ) -> Any:
        """See `EtcdChannel.call`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        with self._exchange(name, waits=waits) as (_, exchange), trio.move_on_after(timeout_s):
            exchange.send_nowait(request)
            return (await exchange.replies())[0]
        raise StatusError("DEADLINE_EXCEEDED", "Deadline Exceeded")

    @asynccontextmanager
    async def open_stream(
        self,
        name: str,
        *,
        metadata: Metadata,  # noqa: ARG002 -- as above
    ) -> AsyncIterator[_Exchange]:
        """See `EtcdChannel.open_stream`."""
        with self._exchange(name) as (call_id, exchange):
            try:
                yield exchange
            finally:
                if call_id in self._exchanges and self.peer is not None:
                    self.peer.post(encode(Forget(call_id)))

    @contextmanager
    def _exchange(self, name: str, *, waits: bool = False) -> Iterator[tuple[int, _Exchange]]:
        call_id = next(self._ids)
        exchange = _Exchange(Call(call_id, name), self, waits=waits)
        self._exchanges[call_id] = exchange
        try:
            yield call_id, exchange
        finally:
            self._exchanges.pop(call_id, None)

    def close(self) -> None:
        """See `EtcdChannel.close`."""
        self._end_all(StatusError("CANCELLED", "Channel closed!"))

    def _end_all(self, error: StatusError) -> None:
        exchanges, self._exchanges = self._exchanges, {}
        for exchange in exchanges.values():
            exchange.end(error)

    # --- the connection ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Connect, and connect again, until cancelled."""
        pause_s = PAUSE_MIN_S
        while True:
            stream = await self._dial()
            self.is_failing = stream is None
            if stream is None:
                self.unreached()
            else:
                pause_s = PAUSE_MIN_S
                self.peer = peer = StreamPeer(stream)
                self.opened(peer)
                try:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._listen_for_silence, peer)
                        await peer.run(self._receive)
                        nursery.cancel_scope.cancel()
                finally:
                    self.peer = None
                    self.lost()
                self.last_words = f"the connection to {self.where} was lost"
            await trio.sleep(self._jitter(pause_s))
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _jitter(self, seconds: float) -> float:
        return seconds * self._rng.uniform(0.5, 1.5)

    async def _dial(self) -> trio.SocketStream | None:
        with trio.move_on_after(self._dial_timeout_s):
            try:
                return await trio.open_tcp_stream(self._host, self._port)
            except OSError as error:
                self.last_words = f"cannot connect to {self.where}: {error}"
                return None
        self.last_words = f"{self.where} does not answer"
        return None

    def _receive(self, frame: Frame) -> None:
        self._alarm.deadline = trio.current_time() + self._silence_s / 2
        self.received(frame)

    async def _listen_for_silence(self, peer: StreamPeer) -> None:
        half_s, asked_s = self._silence_s / 2, -math.inf
        while True:
            # The deadline moves with every frame, so that a busy connection costs no step.
            with trio.CancelScope(deadline=trio.current_time() + half_s) as self._alarm:
                await trio.sleep_forever()
            if peer.heard_s < asked_s:
                peer.close()
                return
            asked_s = trio.current_time()
            self.ping(peer)

    def opened(self, peer: StreamPeer) -> None:
        """A connection is there; nothing was sent on it yet."""
        for exchange in self._exchanges.values():
            exchange.opened(peer)

    def unreached(self) -> None:
        """The service could not be dialled; it is tried again after a pause."""
        exchanges = self._exchanges
        self._exchanges = {call_id: each for call_id, each in exchanges.items() if each.waits}
        for exchange in exchanges.values():
            exchange.unreached()

    def ping(self, peer: StreamPeer) -> None:
        """Post something that the service answers at once."""
        peer.post(encode(Heartbeat()))

    def lost(self) -> None:
        """The connection is gone; what was posted on it may or may not have arrived."""
        self._end_all(StatusError("UNAVAILABLE", "Socket closed"))

    def received(self, frame: Frame) -> None:
        """A frame came: of a reply that may come twice, or after its call was given up."""
        header, data = frame
        message = _read(header)
        if isinstance(message, CallResult):
            exchange = self._exchanges.get(message.id)
            if exchange is not None:
                exchange.received(data)
        elif isinstance(message, Refusal):
            exchange = self._exchanges.pop(message.id, None)
            if exchange is not None:
                exchange.end(StatusError(message.code, message.message))


@asynccontextmanager
async def open_simulated_etcd(
    host: str = "etcd",
    port: int = PORT,
    *,
    rng: random.Random,
    timeout_s: float = 5.0,
    per_try_timeout_s: float = 1.0,
    silence_s: float = 6.0,
) -> AsyncIterator[EtcdControlPlane]:
    """Open a control plane over the store on `host`, from the running task's host.

    As `open_etcd`, which says what the options mean. `rng` are the dice for the pauses between two
    tries to connect: the environment's.
    """
    channel = SimulatedChannel(host, port, rng=rng, dial_timeout_s=per_try_timeout_s)
    client = EtcdClient(
        channel,
        where=channel.where,
        rng=rng,
        timeout_s=timeout_s,
        per_try_timeout_s=per_try_timeout_s,
    )
    async with open_nursery() as nursery:
        nursery.start_soon(channel.run)
        try:
            async with open_plane(client, silence_s=silence_s) as plane:
                yield plane
        finally:
            nursery.cancel_scope.cancel()
