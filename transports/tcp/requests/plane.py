"""The caller's end of the tcp request plane: one pipelined connection per worker process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import outcome
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
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.streams.codec import FrameDecoder, encode_frame
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.runtime.protocol.streams.request import (
    Answer,
    Envelope,
    decode_answer,
    encode_cancel,
    encode_envelope,
    raise_for_nack,
    readable_id,
)

from ..greeting import dial_member
from ..sockets import TcpOptions
from ..streams.outbox import Outbox

__all__ = ["TcpRequestPlane", "open_request_plane"]


class TcpRequestPlane:
    """A `RequestPlane` over TCP. Connections are made on first use and kept."""

    transport = "tcp"
    is_usable = True

    def __init__(self, options: TcpOptions, env: Env, nursery: trio.Nursery) -> None:
        self.options = options
        self.env = env
        self._nursery = nursery
        self._links: dict[str, _Link] = {}

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

    async def send(self, address: str, envelope: Envelope, payload: bytes) -> Answer:
        """Deliver a streaming request and return the worker's ACK or NACK.

        Cancelled while waiting, it has told the worker to forget the request.
        """
        with trio.move_on_after(self.options.ack_timeout_s):
            answer, _ = await self._ask(address, envelope, payload)
            return answer.ack
        link = self._links.get(address)
        if link is not None and not link.is_connected:
            raise ConnectError(
                f"no connection to {address} within {self.options.ack_timeout_s:g} s"
            )
        raise DisconnectedError(
            f"{address} did not answer the envelope within {self.options.ack_timeout_s:g} s"
        )

    async def call(self, address: str, envelope: Envelope, payload: bytes) -> bytes:
        """Deliver a unary request and return its encoded result.

        Raises what the worker raised, `OverloadedError`, `UnavailableError` or `RequestError` for
        a NACK, `ConnectError` (nothing sent) or `DisconnectedError` (it may have run).
        """
        answer, result = await self._ask(address, envelope, payload)
        raise_for_nack(answer)
        return result

    async def _ask(self, address: str, envelope: Envelope, payload: bytes) -> tuple[Answer, bytes]:
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
        link = self._link(address)
        return await link.ask(envelope.id, envelope.instance_id, encode_frame(header, payload))

    def _link(self, address: str) -> _Link:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = _Link(self, address)
            self._nursery.start_soon(link.run)
        return link

    def forget(self, link: _Link) -> None:
        """Drop a connection that ended, so that the next request makes a new one."""
        if self._links.get(link.address) is link:
            del self._links[link.address]


class _Link:
    """One connection to one worker, from dialling to its end; a task of the plane."""

    def __init__(self, plane: TcpRequestPlane, address: str) -> None:
        self.address = address
        self._plane = plane
        self._outbox = Outbox(plane.options.queue_bytes_max)
        self._waiting: dict[str, trio.lowlevel.Task] = {}
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

    async def ask(self, request_id: str, instance_id: str, frame: bytes) -> tuple[Answer, bytes]:
        if not self._connected.is_set():
            await self._connected.wait()
        if self._outbox.queued_bytes >= self._plane.options.queue_bytes_max:
            await self._outbox.drain()
        if self._error is not None:
            raise _copy(self._error)
        self.check(instance_id)
        assert request_id not in self._waiting, f"request id {request_id} asked twice"
        self._outbox.put_nowait(frame)
        self._waiting[request_id] = trio.lowlevel.current_task()

        def abandon(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            del self._waiting[request_id]
            self._outbox.put_nowait(encode_frame(encode_cancel(request_id)))
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
        for task in waiting.values():
            trio.lowlevel.reschedule(task, outcome.Error(_copy(error)))

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
        said: outcome.Outcome[tuple[Answer, bytes]]
        try:
            answer = decode_answer(header)
        except RemoteProtocolError as error:
            request_id, said = readable_id(header), outcome.Error(error)
            if not request_id:
                # Whoever it was for would wait for ever, so it is for all.
                raise
        else:
            request_id, said = answer.id, outcome.Value((answer, result))
            if not request_id:
                # An answer to no request: the worker calls our bytes malformed.
                raise RemoteProtocolError(f"turned away: {answer.message}")
        task = self._waiting.pop(request_id, None)
        if task is not None:
            trio.lowlevel.reschedule(task, said)


def _copy(error: TrinamoError) -> TrinamoError:
    """An exception of its own for every waiter: a shared one would mix their tracebacks."""
    return type(error)(error.message)


@asynccontextmanager
async def open_request_plane(options: TcpOptions, env: Env) -> AsyncIterator[TcpRequestPlane]:
    """The caller's request plane; leaving it closes every connection."""
    async with open_nursery() as nursery:
        yield TcpRequestPlane(options, env, nursery)
        nursery.cancel_scope.cancel()
