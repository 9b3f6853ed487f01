"""The caller's end of the tcp request plane: one link to each worker process, dialled on first use.

Up to `links_max` are kept, whether or not somebody asks there. For one more the one that is idle longest is
closed, and made again for the next request to its worker.

Requests and answers are messages of the link (`streams/link.py`). The answer to a streaming request is
a stream that the worker opens on the same link, at the process's `TcpStreamServer`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import islice
from typing import Final

import attrs
import trio

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
from trinamo.runtime.nurseries import forget_frames, open_nursery
from trinamo.runtime.planes import TakeAnswer
from trinamo.runtime.protocol.streams.control import Refused
from trinamo.runtime.protocol.streams.link_frames import MESSAGES_FROM, Opening, encode_event
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.runtime.protocol.streams.request import (
    Envelope,
    Reason,
    RequestAnswer,
    decode_answer,
    encode_cancel,
    encode_envelope,
    readable_id,
)

from ..greeting import dial_member
from ..sockets import TcpOptions
from ..streams.link import Link
from ..streams.server import TcpStreamServer

_DIALLING_MAX: Final = 16
"""So many links are made at once to be kept: a request that needs one of its own must not wait for a thousand,
each of which may cost both ends a TLS handshake."""
_STREAMS_MAX: Final = MESSAGES_FROM - (1 << 16)
"""A link on which so many streams were opened takes no more requests, and another one is dialled."""


class TcpRequestPlane:
    """A `RequestPlane` over TCP. Links are made on first use, or to be held, and kept.

    Streams that workers open on them are those of `home`; without it none can be asked for.
    """

    transport = "tcp"
    is_usable = True
    acknowledges = False

    def __init__(
        self,
        options: TcpOptions,
        env: Env,
        nursery: trio.Nursery,
        home: TcpStreamServer | None = None,
    ) -> None:
        self.options = options
        self.env = env
        self.home = home
        self._nursery = nursery
        self._workers: dict[str, WorkerLink] = {}
        """By address; who was asked last comes last."""
        self._dialling = trio.Semaphore(_DIALLING_MAX)
        self._parked: dict[str, trio.lowlevel.ParkingLot] = {}
        """Who held a link that was closed for another, by address."""

    @property
    def connection_count(self) -> int:
        return len(self._workers)

    async def hold(
        self, address: str, on_connected: Callable[[], None], *, instance_id: str = ""
    ) -> None:
        """Connect to a worker if need be, and return when that connection is lost.

        This is how a dead worker is noticed in milliseconds, without waiting for its lease. One that is closed
        for another is not lost: it is held again once it is made for a request, or there is room. Raises
        `ImpostorError` if another instance than `instance_id` answers at its address.
        """
        while True:
            async with self._dialling:
                worker = self._worker(address)
                with worker.awaited():
                    await worker.wait_connected()
            worker.check(instance_id)
            on_connected()
            self._shed()
            await worker.ended.wait()
            if not worker.is_shed:
                return
            # Once there is a link to it, made for a request, or may be one.
            if address in self._workers or len(self._workers) < self.options.links_max:
                await trio.lowlevel.checkpoint()
                continue
            lot = self._parked.setdefault(address, trio.lowlevel.ParkingLot())
            try:
                await lot.park()
            finally:
                if not lot and self._parked.get(address) is lot:
                    del self._parked[address]

    def _shed(self) -> None:
        """Of more links than are kept close those that are idle longest, as far as any are."""
        surplus = len(self._workers) - self.options.links_max
        if surplus > 0:
            idle = (each for each in self._workers.values() if each.is_idle)
            for worker in list(islice(idle, surplus)):
                del self._workers[worker.address]
                worker.shed()

    def post(
        self, address: str, envelope: Envelope, payload: bytes, take: TakeAnswer
    ) -> _Delivery | None:
        """Deliver a request, unless its link has yet to be made or has no room."""
        worker = self._workers.get(address)
        if worker is None or not worker.has_room:
            return None
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
        self._workers[address] = self._workers.pop(address)
        return worker.post(envelope.id, envelope.instance_id, header, payload, take)

    async def wait_room(self, address: str) -> None:
        """Dial if need be, and wait until the link has room, `ack_timeout_s` at most."""
        timeout_s = self.options.ack_timeout_s
        worker = self._worker(address)
        with trio.move_on_after(timeout_s), worker.awaited():
            await worker.wait_room()
            return
        if worker.is_connected:
            raise DisconnectedError(f"{address} took no request within {timeout_s:g} s")
        raise ConnectError(f"cannot be reached at {address}: no greeting within {timeout_s:g} s")

    def _worker(self, address: str) -> WorkerLink:
        worker = self._workers.get(address)
        if worker is None or worker.is_spent:
            self._workers.pop(address, None)
            worker = self._workers[address] = WorkerLink(self, address)
            start_nameless(self._nursery, worker.run)
            self._shed()
            if (lot := self._parked.pop(address, None)) is not None:
                lot.unpark_all()
        return worker

    def forget(self, worker: WorkerLink) -> None:
        """Drop a link that ended, so that the next request makes a new one."""
        if self._workers.get(worker.address) is worker:
            del self._workers[worker.address]
            if self._parked and len(self._workers) < self.options.links_max:
                self._parked.pop(next(iter(self._parked))).unpark_all()


@attrs.define(eq=False)
class _Delivery:
    """One request that was sent, and who takes its answer."""

    request_id: str
    take: TakeAnswer
    _worker: WorkerLink
    number: int = 0
    """Of the message, if it is so long that it is sent in parts."""

    def cancel(self, reason: Reason = Reason.CONSUMER_DROPPED) -> None:
        """No answer is wanted any more; the worker is told so."""
        self._worker.drop(self, reason)

    def forget(self) -> None:
        """No answer is wanted any more; the worker is not told."""
        self._worker.drop(self, None)


class WorkerLink:
    """One worker: the link to it, from dialling to its end, and who waits for its answers."""

    def __init__(self, plane: TcpRequestPlane, address: str) -> None:
        self.address = address
        self.link: Link | None = None
        self.ended = trio.Event()
        """The link is lost, or was never made."""
        self.waiter_count = 0
        """Who waits for it to stand, or to have room."""
        self.is_shed = False
        """It was idle, and made room for another."""
        self._plane = plane
        self._waiting: dict[str, _Delivery] = {}
        self._instance_id = ""
        self._connected = trio.Event()
        self._error: TrinamoError | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the link stands, or has stood; before that nothing was sent."""
        return self._connected.is_set()

    @property
    def is_spent(self) -> bool:
        """Whether nothing new goes by the link, which stays for the streams it has, or for its last word."""
        link = self.link
        return link is not None and (link.is_closed or link.ids.newest > _STREAMS_MAX)

    @property
    def is_idle(self) -> bool:
        """Whether the link stands, and no request is under way on it or about to be posted."""
        link = self.link
        return link is not None and not (link.lanes or self._waiting or self.waiter_count)

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """It is not idle while inside, be there a request or not."""
        self.waiter_count += 1
        try:
            yield
        finally:
            self.waiter_count -= 1

    def shed(self) -> None:
        """Close the link, which is idle, once all is sent."""
        assert self.link is not None, "it stands"
        self.is_shed = True
        self.link.close()

    @property
    def has_room(self) -> bool:
        """Whether a request can be sent now, without waiting for anything."""
        link = self.link
        return (
            link is not None
            and link.has_room_for_messages
            and self._error is None
            and not self.is_spent
        )

    async def wait_connected(self) -> None:
        """Return once the link stands; raises what went wrong if it does not."""
        await self._connected.wait()
        if self._error is not None:
            raise _copy(self._error)

    async def wait_room(self) -> None:
        """Return once a request can be sent; raises what went wrong if it never can."""
        if self.link is None:
            await self._connected.wait()
        if self.link is not None and not self.link.has_room_for_messages:
            await self.link.wait_room_for_messages()
        if self._error is not None:
            raise _copy(self._error)

    def check(self, instance_id: str) -> None:
        """Raise `ImpostorError` if it is not `instance_id` that greeted; empty: anyone will do."""
        if instance_id not in ("", self._instance_id):
            raise ImpostorError(
                f"at {self.address} answers instance {self._instance_id}, not {instance_id}"
            )

    def post(
        self, request_id: str, instance_id: str, header: bytes, payload: bytes, take: TakeAnswer
    ) -> _Delivery:
        """Send a request; `take` gets its answer, or what became of the link."""
        self.check(instance_id)
        assert request_id not in self._waiting, f"request id {request_id} asked twice"
        assert self.link is not None, "posted before it stood"
        number = self.link.send_message(header, payload)
        delivery = self._waiting[request_id] = _Delivery(request_id, take, self, number)
        return delivery

    def drop(self, delivery: _Delivery, reason: Reason | None) -> None:
        """Nobody wants the answer to `delivery`; does nothing once it has come.

        The worker is told `reason`, if there is one; a request that is still on its way there just
        stays away.
        """
        if self._waiting.pop(delivery.request_id, None) is None or reason is None:
            return
        assert self.link is not None, "it was posted"
        if not self.link.drop_message(delivery.number):
            self.link.send_message(encode_cancel(delivery.request_id, reason), b"")

    async def run(self) -> None:
        error: TrinamoError = DisconnectedError(f"the connection to {self.address} ended")
        options, home = self._plane.options, self._plane.home
        try:
            wire, self._instance_id = await dial_member(
                self.address, options, self._plane.env, Purpose.REQUESTS
            )
            opened = _refuse if home is None else home.open
            self.link = link = Link(wire, options, opened, taken=self._take)
            self._connected.set()
            await (link.run() if home is None else home.serve(link))
            error = link.fault or error
        except ConnectError as failed:
            forget_frames(failed)  # This one is among them, and holds it.
            error = failed
        finally:
            self._end(error)

    def _end(self, error: TrinamoError) -> None:
        self._plane.forget(self)
        self._error = (
            _copy(error) if isinstance(error, ConnectError) else ConnectError(error.message)
        )
        self._connected.set()
        self.ended.set()
        waiting, self._waiting = self._waiting, {}
        for delivery in waiting.values():
            delivery.take(_copy(error), b"")

    def _take(self, header: bytes, result: bytes) -> None:
        answer: RequestAnswer | TrinamoError
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
                # An answer to no request: the worker calls one of ours malformed.
                raise RemoteProtocolError(f"turned away: {answer.message}")
        delivery = self._waiting.pop(request_id, None)
        if delivery is not None:
            delivery.take(answer, result)


def _refuse(link: Link, stream: int, _: Opening) -> None:
    refusal = Refused("unknown_subject", "this process takes no streams")
    link.send_frame(encode_event(stream, refusal))


def _copy(error: TrinamoError) -> TrinamoError:
    """An exception of its own for every waiter: a shared one would mix their tracebacks."""
    return type(error)(error.message)


@asynccontextmanager
async def open_request_plane(
    options: TcpOptions, env: Env, home: TcpStreamServer | None = None
) -> AsyncIterator[TcpRequestPlane]:
    """The caller's request plane; leaving it closes every link.

    `home` takes the streams that answer requests; without it the plane carries unary requests alone.
    """
    async with open_nursery() as nursery:
        yield TcpRequestPlane(options, env, nursery, home)
        nursery.cancel_scope.cancel()
