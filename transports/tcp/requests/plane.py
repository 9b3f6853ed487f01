"""The caller's end of the tcp request plane: one pipelined connection per worker process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import attrs
import outcome
import trio

from trinamo.runtime.deadlines import Deadlines
from trinamo.runtime.env import Env
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    ImpostorError,
    RemoteProtocolError,
    RequestError,
    TrinamoError,
)
from trinamo.runtime.logs.fields import start_nameless
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.planes import TakeAnswer, WhyLeft, dropped
from trinamo.runtime.protocol.streams.codec import FrameDecoder, encode_frame
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.runtime.protocol.streams.reasons import Reason
from trinamo.runtime.protocol.streams.request import (
    Answer,
    Envelope,
    RequestKind,
    decode_answer,
    encode_cancel,
    encode_envelope,
    raise_for_nack,
    readable_id,
)

from ..greeting import dial_member
from ..sockets import TcpOptions
from ..streams.outbox import Outbox


class TcpRequestPlane:
    """A `RequestPlane` over TCP. Connections are made on first use and kept."""

    transport = "tcp"
    is_usable = True

    def __init__(self, options: TcpOptions, env: Env, nursery: trio.Nursery) -> None:
        self.options = options
        self.env = env
        self._nursery = nursery
        self._links: dict[str, _Link] = {}
        self.acks: Deadlines[_Delivery] = Deadlines(options.ack_timeout_s, _Delivery.expire)
        """Of what was posted."""
        nursery.start_soon(self.acks.run)

    @property
    def connection_count(self) -> int:
        """Connections held now."""
        return len(self._links)

    async def hold(
        self, address: str, on_connected: Callable[[], None], *, instance_id: str = ""
    ) -> None:
        """Connect to a worker if need be, and return when that connection is lost.

        This is how a dead worker is noticed in milliseconds, without waiting for its lease. Raises
        `ImpostorError` if another instance than `instance_id` answers at its address.
        """
        link = self._link(address)
        await link.wait_connected()
        link.check(instance_id)
        on_connected()
        await link.wait_ended()

    def post(
        self, address: str, envelope: Envelope, payload: bytes, take: TakeAnswer
    ) -> _Delivery | None:
        """Deliver a request, unless its connection has yet to be made or has no room."""
        link = self._links.get(address)
        if link is None or not link.has_room:
            return None
        frame = self._encode(envelope, payload)
        delivery = link.post(envelope.id, envelope.instance_id, frame, take)
        if envelope.kind is not RequestKind.UNARY:
            self.acks.begin(delivery)
        return delivery

    async def send(
        self, address: str, envelope: Envelope, payload: bytes, *, why_left: WhyLeft = dropped
    ) -> Answer:
        """Deliver a streaming request and return the worker's ACK or NACK.

        Cancelled while waiting, it has told the worker to forget the request.
        """
        with trio.move_on_after(self.options.ack_timeout_s):
            answer, _ = await self._ask(address, envelope, payload, why_left)
            return answer.ack
        link = self._links.get(address)
        if link is not None and not link.is_connected:
            raise ConnectError(
                f"cannot be reached at {address}: no greeting within {self.options.ack_timeout_s:g} s"
            )
        raise self.unanswered(address)

    def unanswered(self, address: str) -> DisconnectedError:
        """What is said of a worker that takes an envelope, and says nothing."""
        timeout_s = self.options.ack_timeout_s
        return DisconnectedError(f"{address} did not answer the envelope within {timeout_s:g} s")

    async def call(
        self, address: str, envelope: Envelope, payload: bytes, *, why_left: WhyLeft = dropped
    ) -> bytes:
        """Deliver a unary request and return its encoded result.

        Raises what the worker raised, `OverloadedError`, `UnavailableError` or `RequestError` for
        a NACK, `ConnectError` (nothing sent) or `DisconnectedError` (it may have run).
        """
        answer, result = await self._ask(address, envelope, payload, why_left)
        raise_for_nack(answer)
        return result

    async def _ask(
        self, address: str, envelope: Envelope, payload: bytes, why_left: WhyLeft
    ) -> tuple[Answer, bytes]:
        frame = self._encode(envelope, payload)
        return await self._link(address).ask(envelope.id, envelope.instance_id, frame, why_left)

    def _encode(self, envelope: Envelope, payload: bytes) -> bytes:
        # The worker would hang up on more, and with it on every other request of this process.
        if len(payload) > self.options.data_bytes_max:
            raise RequestError(
                f"a payload of {len(payload)} bytes; at most {self.options.data_bytes_max}"
            )
        header = encode_envelope(envelope)
        if len(header) > self.options.header_bytes_max:
            raise RequestError(
                f"an envelope of {len(header)} bytes; at most {self.options.header_bytes_max}"
            )
        return encode_frame(header, payload)

    def _link(self, address: str) -> _Link:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = _Link(self, address)
            start_nameless(self._nursery, link.run)
        return link

    def forget(self, link: _Link) -> None:
        """Drop a connection that ended, so that the next request makes a new one."""
        if self._links.get(link.address) is link:
            del self._links[link.address]


@attrs.define(eq=False)
class _Delivery:
    """One request that was sent, and who takes its answer."""

    request_id: str
    take: TakeAnswer
    _link: _Link

    def cancel(self, reason: Reason = Reason.CONSUMER_DROPPED) -> None:
        """No answer is wanted any more; the worker is told so."""
        self._link.drop(self, reason)

    def forget(self) -> None:
        """No answer is wanted any more; the worker is not told."""
        self._link.drop(self, None)

    def expire(self) -> None:
        """The ACK has not come in time."""
        self.cancel()
        self.take(self._link.unanswered(), b"")


class _Link:
    """One connection to one worker, from dialling to its end; a task of the plane."""

    def __init__(self, plane: TcpRequestPlane, address: str) -> None:
        self.address = address
        self._plane = plane
        self._outbox = Outbox(plane.options.queue_bytes_max)
        self._waiting: dict[str, _Delivery] = {}
        self._instance_id = ""
        self._connected = trio.Event()
        self._ended = trio.Event()
        self._error: TrinamoError | None = None

    @property
    def is_connected(self) -> bool:
        """Whether it stands, or has stood; before that nothing was sent."""
        return self._connected.is_set()

    async def wait_connected(self) -> None:
        """Return once the connection stands; raises what went wrong if it does not."""
        await self._connected.wait()
        if self._error is not None:
            raise _copy(self._error)

    async def wait_ended(self) -> None:
        """Return once the connection is lost."""
        await self._ended.wait()

    def check(self, instance_id: str) -> None:
        """Raise `ImpostorError` if it is not `instance_id` that greeted; empty: anyone will do."""
        if instance_id not in ("", self._instance_id):
            raise ImpostorError(
                f"at {self.address} answers instance {self._instance_id}, not {instance_id}"
            )

    @property
    def has_room(self) -> bool:
        """Whether a request can be sent now, without waiting for anything."""
        return (
            self._connected.is_set()
            and self._error is None
            and self._outbox.queued_bytes < self._plane.options.queue_bytes_max
        )

    def post(self, request_id: str, instance_id: str, frame: bytes, take: TakeAnswer) -> _Delivery:
        """Send a request; `take` gets its answer, or what became of the connection."""
        self.check(instance_id)
        assert request_id not in self._waiting, f"request id {request_id} asked twice"
        self._outbox.put_nowait(frame)
        delivery = self._waiting[request_id] = _Delivery(request_id, take, self)
        return delivery

    def drop(self, delivery: _Delivery, reason: Reason | None) -> None:
        """Nobody wants the answer to `delivery`; does nothing once it has come.

        The worker is told `reason`, if there is one.
        """
        if self._waiting.pop(delivery.request_id, None) is not None:
            self._plane.acks.end(delivery)
            if reason is not None:
                self._outbox.put_nowait(encode_frame(encode_cancel(delivery.request_id, reason)))

    def unanswered(self) -> DisconnectedError:
        return self._plane.unanswered(self.address)

    async def ask(
        self, request_id: str, instance_id: str, frame: bytes, why_left: WhyLeft
    ) -> tuple[Answer, bytes]:
        if not self._connected.is_set():
            await self._connected.wait()
        if self._outbox.queued_bytes >= self._plane.options.queue_bytes_max:
            await self._outbox.drain()
        if self._error is not None:
            raise _copy(self._error)
        task = trio.lowlevel.current_task()

        def take(answer: Answer | TrinamoError, result: bytes) -> None:
            said: outcome.Outcome[tuple[Answer, bytes]]
            if isinstance(answer, TrinamoError):
                said = outcome.Error(answer)
            else:
                said = outcome.Value((answer, result))
            trio.lowlevel.reschedule(task, said)

        delivery = self.post(request_id, instance_id, frame, take)

        def abandon(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            delivery.cancel(why_left())
            return trio.lowlevel.Abort.SUCCEEDED

        answer: tuple[Answer, bytes] = await trio.lowlevel.wait_task_rescheduled(abandon)
        return answer

    async def run(self) -> None:
        error: TrinamoError = DisconnectedError(f"the connection to {self.address} ended")
        try:
            stream, self._instance_id = await dial_member(
                self.address, self._plane.options, self._plane.env, Purpose.REQUESTS
            )
            async with stream:
                self._connected.set()
                async with open_nursery() as nursery:
                    nursery.start_soon(self._write, stream, nursery.cancel_scope)
                    try:
                        await self._read(stream)
                    except RemoteProtocolError as bad:
                        error = bad
                    nursery.cancel_scope.cancel()
        except ConnectError as failed:
            error = failed
        finally:
            self._end(error)

    def _end(self, error: TrinamoError) -> None:
        self._plane.forget(self)
        self._error = error if isinstance(error, ConnectError) else ConnectError(error.message)
        self._connected.set()
        self._ended.set()
        self._outbox.discard()
        waiting, self._waiting = self._waiting, {}
        for delivery in waiting.values():
            self._plane.acks.end(delivery)
            delivery.take(_copy(error), b"")

    async def _write(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        try:
            await self._outbox.run(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            scope.cancel()

    async def _read(self, stream: trio.SocketStream) -> None:
        options = self._plane.options
        decoder = FrameDecoder(
            header_bytes_max=options.header_bytes_max, data_bytes_max=options.data_bytes_max
        )
        unfinished = options.unfinished(decoder)
        try:
            while data := await unfinished.receive(stream.socket):
                for header, result in decoder.feed(data):
                    self._take(header, result)
                decoder.check()
        except (OSError, trio.ClosedResourceError):
            pass
        finally:
            unfinished.close()

    def _take(self, header: bytes, result: bytes) -> None:
        answer: Answer | TrinamoError
        try:
            answer = decode_answer(header)
            request_id = answer.id
        except RemoteProtocolError as error:
            request_id, answer = readable_id(header), error
            if not request_id:
                # Whoever it was for would wait for ever, so it is for all.
                raise
        else:
            if not request_id:
                # An answer to no request: the worker calls our bytes malformed.
                raise RemoteProtocolError(f"turned away: {answer.message}")
        delivery = self._waiting.pop(request_id, None)
        if delivery is not None:
            self._plane.acks.end(delivery)
            delivery.take(answer, result)


def _copy(error: TrinamoError) -> TrinamoError:
    """An exception of its own for every waiter: a shared one would mix their tracebacks."""
    return type(error)(error.message)


@asynccontextmanager
async def open_request_plane(options: TcpOptions, env: Env) -> AsyncIterator[TcpRequestPlane]:
    """The caller's request plane; leaving it closes every connection."""
    async with open_nursery() as nursery:
        yield TcpRequestPlane(options, env, nursery)
        nursery.cancel_scope.cancel()
