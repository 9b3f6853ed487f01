"""The control plane over a simulated store: `transports/etcd`, on a channel of our own.

Watches, leases, deadlines and repetition are the production's. Only what gRPC does is done here: it
holds one connection and dials it again, and it ends calls and streams with a status. As gRPC does,
it fails them at once while the store cannot be reached, and lets them wait before that is known.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import trio
from typing_extensions import override

from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.streams.codec import Frame
from trinamo.transports.etcd.client import EtcdClient
from trinamo.transports.etcd.control import EtcdControlPlane, open_plane
from trinamo.transports.etcd.rpc import METHODS, Metadata, StatusError, StreamLostError

from ..peer import StreamPeer
from .connector import Connector
from .server import PORT
from .wire import Call, CallResult, Forget, Heartbeat, Pong, Refusal, encode, reader

KEEP_ALIVE_S: Final = 8.0
"""gRPC, as `transports/etcd/bridge.py` sets it up, pings after six seconds and waits two."""

REQUESTS_MAX: Final = 10_000
REPLIES_MAX: Final = 10_000
"""How much waits for a connection, and for a reader."""
_read = reader(CallResult | Refusal | Pong)


class _Exchange:
    """One call or stream: requests there, replies back. Implements `Stream`."""

    def __init__(self, call: Call, connector: Connector, *, waits: bool) -> None:
        self._head, self._method = encode(call), METHODS[call.op]
        self._connector = connector
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
        if self._connector.peer is not None:
            self.opened(self._connector.peer)
        elif self._connector.is_failing:
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
        why = f"failed to connect to all addresses; last error: {self._connector.last_words}"
        self.end(StatusError("UNAVAILABLE", why))

    def end(self, error: StatusError) -> None:
        """No reply comes any more."""
        if self._error is None:
            self._error = error
            self._came.unpark_all()


class SimulatedChannel(Connector):
    """Calls and streams over one connection that comes and goes. Implements `Channel`."""

    def __init__(self, *where: Any, **how: Any) -> None:
        super().__init__(*where, **how)
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

    @override
    def opened(self, peer: StreamPeer) -> None:
        for exchange in self._exchanges.values():
            exchange.opened(peer)

    @override
    def unreached(self) -> None:
        exchanges = self._exchanges
        self._exchanges = {call_id: each for call_id, each in exchanges.items() if each.waits}
        for exchange in exchanges.values():
            exchange.unreached()

    @override
    def ping(self, peer: StreamPeer) -> None:
        peer.post(encode(Heartbeat()))

    @override
    def lost(self) -> None:
        self._end_all(StatusError("UNAVAILABLE", "Socket closed"))

    @override
    def received(self, frame: Frame) -> None:
        # A reply may come twice, or after its call was given up.
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
    channel = SimulatedChannel(
        host, port, rng=rng, dial_timeout_s=per_try_timeout_s, silence_s=KEEP_ALIVE_S
    )
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
