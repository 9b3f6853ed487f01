"""The end of a transfer stream that dialled, and the transfers it asks for.

`PeerStream` keeps one stream to one peer, dialled when it is first needed and again when it broke. Dials
to different peers know nothing of each other, and whoever waits for one may stop waiting.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import attrs
import trio

from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    RemoteProtocolError,
    StaleMemoryError,
    StalledError,
    TrinamoError,
    error_from_wire,
)
from trinamo.runtime.planes import RemoteMemory, Transfer
from trinamo.runtime.planes.transfer import again
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.runtime.protocol.transfer.stream import (
    Abort,
    Confirmed,
    Finished,
    Notify,
    Read,
    TransferFailed,
    TransferMessage,
    Write,
    pack_blocks,
)
from trinamo.transports.sockets.wire import Wire

from .link import TransferLink
from .memory import BlockFlow
from .sealed import PieceBuffers


class TransferRequest:
    def __init__(self, number: int) -> None:
        self.id = number
        self.is_over = False
        """Whether nothing more comes for it."""
        self.on_confirmed: Callable[[int], object] = lambda _: None
        self._error: TrinamoError | None = None
        self._done = trio.Event()

    def finish(self) -> None:
        self.is_over = True
        self._done.set()

    def fail(self, error: TrinamoError) -> None:
        if self._error is None:
            self._error = error
        self._done.set()

    async def wait(self) -> None:
        """Return once it is done; raise why it will not be."""
        await self._done.wait()
        if self._error is not None:
            raise again(self._error)


class InitiatorLink(TransferLink):
    def __init__(self, wire: Wire, buffers: PieceBuffers, *, slice_bytes: int) -> None:
        super().__init__(wire, buffers, slice_bytes=slice_bytes)
        self._exchanges: dict[int, TransferRequest] = {}
        self._numbers = 0
        self._broken: TrinamoError | None = None

    @contextmanager
    def exchange(
        self, on_confirmed: Callable[[int], object] = lambda _: None
    ) -> Iterator[TransferRequest]:
        """A new request; leaving it before its last answer tells the peer to forget it.

        Raises what broke the stream, if it is over.
        """
        if self._broken is not None:
            raise again(self._broken)
        self._numbers += 1
        exchange = TransferRequest(self._numbers)
        exchange.on_confirmed = on_confirmed
        self._exchanges[exchange.id] = exchange
        try:
            yield exchange
        finally:
            del self._exchanges[exchange.id]
            self.receiving.pop(exchange.id, None)
            if not exchange.is_over:
                self.put(Abort(exchange.id))

    async def move(self, transfer: Transfer) -> None:
        """Do one transfer, and tell who granted the blocks; raises what ends it.

        All it touches of our memory goes through one `BlockFlow`, which is closed the moment the transfer
        is over: so here a transfer is settled as soon as it is over.
        """
        is_read, there = transfer.direction is Direction.READ, transfer.there
        where = (there.region, there.generation, there.block_bytes, transfer.ticket)
        listed = pack_blocks(transfer.remote_blocks)
        with self.exchange(transfer.confirm) as exchange:
            flow = BlockFlow(
                exchange.id,
                transfer.local,
                transfer.local_blocks,
                self.checksum,
                on_fence=exchange.fail,
            )
            transfer.let_go = flow.let_go
            if is_read:
                if flow.blocks:
                    self.receiving[exchange.id] = flow
                self.put(Read(exchange.id, *where), listed)
            else:
                self.put(Write(exchange.id, *where, transfer.notify), listed)
                if flow.blocks:
                    self.send_blocks(flow)
            await exchange.wait()
            if not flow.is_complete:
                raise RemoteProtocolError(
                    f"finished, but only {flow.position} of {len(flow.blocks)} blocks have moved"
                )
            flow.close()
        if is_read and transfer.notify is not None:
            with self.exchange() as exchange:
                self.put(Notify(exchange.id, there.region, transfer.ticket, transfer.notify))
                await exchange.wait()

    def take(self, message: TransferMessage, data: bytes) -> None:
        """Hand an answer to who asked; answers to requests we gave up are dropped."""
        if data:
            raise RemoteProtocolError(f"{type(message).__name__} with a data part")
        match message:
            case Confirmed():
                if (exchange := self._exchanges.get(message.id)) is not None:
                    exchange.on_confirmed(message.count)
            case Finished():
                if (exchange := self._exchanges.get(message.id)) is not None:
                    exchange.finish()
            case TransferFailed():
                error = error_from_wire(message.code, message.message, definite=message.definite)
                if isinstance(error, StalledError):
                    # Only this end finds out that a stream stalls, after seconds. From the peer it would
                    # come at once, and the transfer begin again and again.
                    raise RemoteProtocolError("the peer says that its own stream stalls")
                if (exchange := self._exchanges.get(message.id)) is not None:
                    exchange.is_over = True
                    exchange.fail(error)
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is no answer")

    def received(self, flow: BlockFlow) -> None:
        exchange = self._exchanges.get(flow.id)
        if exchange is not None:
            exchange.on_confirmed(flow.position)

    def fail(self, error: TrinamoError) -> None:
        self._broken = error
        for exchange in list(self._exchanges.values()):
            exchange.is_over = True
            exchange.fail(error)


Dial = Callable[[str, str, Callable[[InitiatorLink], None]], Awaitable[None]]
"""Reaches an address: connects, greets, checks that this incarnation answers, gives the link to the
last argument, and serves it until it is over; raises why. No nursery's `start`, which a waiter could cancel."""


@attrs.define(eq=False)
class _Attempt:
    done: trio.Event = attrs.field(factory=trio.Event)
    link: InitiatorLink | None = None
    error: TrinamoError | None = None

    async def wait(self) -> InitiatorLink:
        await self.done.wait()
        if self.error is not None:
            raise again(self.error)
        assert self.link is not None
        return self.link


class PeerStream:
    def __init__(
        self,
        incarnation: str,
        address: str,
        dial: Dial,
        nursery: trio.Nursery,
        on_unreached: Callable[[PeerStream], None],
    ) -> None:
        self.incarnation, self.address = incarnation, address
        self._dial, self._nursery = dial, nursery
        self._on_unreached = on_unreached
        self._was_reached = False
        self._link: InitiatorLink | None = None
        self._attempt: _Attempt | None = None
        self._scope: trio.CancelScope | None = None
        self._is_forgotten = False

    @property
    def is_reached(self) -> bool:
        return self._link is not None

    async def reach(self) -> InitiatorLink:
        """The stream, dialled if there is none. Cancelled, the dial goes on for others."""
        if self._link is not None:
            return self._link
        if self._is_forgotten:
            raise ConnectError(f"peer {self.incarnation} was forgotten")
        if self._attempt is None:
            self._attempt = _Attempt()
            self._nursery.start_soon(self._serve, self._attempt)
        return await self._attempt.wait()

    def forget(self) -> None:
        """Close the stream; transfers over it fail now."""
        self._is_forgotten = True
        if self._link is not None:
            self._link.fail(DisconnectedError(f"peer {self.incarnation} was forgotten"))
        if self._scope is not None:
            self._scope.cancel()

    def hang_up(self, silent_s: float) -> bool:
        """Close a stream that brought nothing for `silent_s`; its transfers fail, the next one dials."""
        link = self._link
        if link is None or trio.current_time() - link.received_at < silent_s:
            return False
        link.fail(StalledError(f"the stream brought nothing for {silent_s:g} s"))
        self._link = self._attempt = None
        if self._scope is not None:
            self._scope.cancel()
        return True

    async def _serve(self, attempt: _Attempt) -> None:
        def take(link: InitiatorLink) -> None:
            self._link = attempt.link = link
            self._was_reached = True
            attempt.done.set()

        error: TrinamoError = DisconnectedError(f"peer {self.incarnation} was forgotten")
        try:
            with trio.CancelScope() as self._scope:
                if self._is_forgotten:
                    return
                await self._dial(self.address, self.incarnation, take)
        except TrinamoError as found:
            error = found
        finally:
            attempt.error = error
            attempt.done.set()
            # After `hang_up` the stream may be another one, which was dialled meanwhile.
            if self._attempt is attempt:
                link, self._link, self._attempt = self._link, None, None
                if link is not None:
                    link.fail(error)
            if not self._was_reached or isinstance(error, StaleMemoryError):
                # Nobody holds memory of it, or it is no more: also if all have given up waiting.
                self._on_unreached(self)


@attrs.frozen
class TcpRemote(RemoteMemory):
    peer: PeerStream
