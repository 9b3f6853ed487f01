"""The caller's end: one request out, one response stream in.

`Client.stream` chooses an instance, delivers the envelope, and waits for the ACK, the worker's
call and its prologue, watching all the while the request's context, the instance's presence in
discovery, and the connection. Until the first item has come, a failed attempt is tried on another
instance; after that the stream belongs to its worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Container
from contextlib import ExitStack, asynccontextmanager
from typing import Any, Final, TypeVar

import msgspec
import trio

from ..context import Context, Reason
from ..env import Env
from ..errors import (
    ConnectError,
    DeadlineError,
    DisconnectedError,
    KilledError,
    OverloadedError,
    RemoteProtocolError,
    TransportError,
    TrinamoError,
    UnavailableError,
)
from ..logs.fields import add_fields
from ..planes import InputRegistration, Registration, RequestPlane, ResponsePlane
from ..protocol.discovery.instances import Instance
from ..protocol.discovery.presence import InFlight
from ..protocol.streams.request import Answer, Envelope, RequestKind, attempt_id, raise_for_nack
from ..protocol.undecodable import UNDECODABLE
from .router import Router
from .streams import Exchange, ResponseStream

__all__ = ["Client"]

T = TypeVar("T")
_ID_BITS: Final = 64
_ELSEWHERE: Final = (TransportError, RemoteProtocolError, OverloadedError, UnavailableError)
"""What may be tried on another instance; all else would fail there too, or must not run twice."""


class Client:
    """Calls one endpoint, over whatever request planes its instances speak."""

    def __init__(
        self,
        router: Router,
        response_plane: ResponsePlane,
        env: Env,
        *,
        attempts_max: int = 3,
        call_home_timeout_s: float = 10.0,
    ) -> None:
        self.router = router
        self._response_plane = response_plane
        self._env = env
        self._attempts_max = attempts_max
        self._call_home_timeout_s = call_home_timeout_s
        self._encode = msgspec.msgpack.Encoder().encode

    def new_id(self) -> str:
        """A request id, for callers that have none of their own."""
        return f"{self._env.rng.getrandbits(_ID_BITS):016x}"

    @asynccontextmanager
    async def stream(
        self,
        request: Any,
        item_type: type[T],
        *,
        context: Context | None = None,
        instance_id: str | None = None,
        among: Container[str] | None = None,
    ) -> AsyncIterator[ResponseStream[T]]:
        """Send `request` and yield its stream once the handler has started.

        Attempts go to `attempts_max` instances at most, none twice, and with `among` to those ids
        only; a named `instance_id` is the only one tried. Raises `UnavailableError` if nobody is live, else the last attempt's error.
        """
        context = context or Context(self.new_id())
        payload = self._encode(request)
        decoder = msgspec.msgpack.Decoder(item_type)
        with ExitStack() as held:
            attempt = await self._dispatch(
                held,
                context,
                payload,
                instance_id=instance_id,
                among=among,
            )
            yield ResponseStream(attempt.channel, decoder, self.router, attempt.instance)

    @asynccontextmanager
    async def exchange(
        self,
        request: Any,
        item_type: type[T],
        *,
        context: Context | None = None,
        instance_id: str | None = None,
    ) -> AsyncIterator[Exchange[T]]:
        """As `stream`, of an endpoint that is also streamed to; `send` its input, then `finish`.

        No input is sent before a worker has the request, so attempts go to other instances as those
        of `stream` do.
        """
        context = context or Context(self.new_id())
        with ExitStack() as held:
            attempt = await self._dispatch(
                held, context, self._encode(request), instance_id=instance_id, takes_input=True
            )
            assert attempt.input is not None
            decoder = msgspec.msgpack.Decoder(item_type)
            yield Exchange(attempt.channel, decoder, self.router, attempt.instance, attempt.input)

    async def call(
        self,
        request: Any,
        result_type: type[T],
        *,
        instance_id: str | None = None,
        timeout_s: float | None = None,
    ) -> T:
        """One value for one request, without a response stream.

        Tried elsewhere only if it certainly did not run. Raises `DeadlineError` after `timeout_s`,
        having told the worker to forget it.
        """
        if timeout_s is None:
            return await self._call(request, result_type, instance_id)
        with trio.move_on_after(timeout_s):
            return await self._call(request, result_type, instance_id)
        raise DeadlineError(f"no answer from {self.router.endpoint} within {timeout_s:g} s")

    async def _call(self, request: Any, result_type: type[T], instance_id: str | None) -> T:
        payload = self._encode(request)
        tried: list[str] = []
        failed: TrinamoError | None = None
        while True:
            instance = self._choose(instance_id, tried, failed)
            tried.append(instance.id)
            add_fields(instance_id=instance.id)
            envelope = Envelope(
                id=self.new_id(),
                endpoint=instance.endpoint,
                instance_id=instance.id,
                kind=RequestKind.UNARY,
            )
            try:
                plane, address = self._route(instance)
                attempt = _UnaryAttempt()
                with self.router.flight(instance, attempt):
                    result = await attempt.run(plane, address, envelope, payload)
            except _ELSEWHERE as error:
                failed = error
                self._blame(instance, error)
                if not error.definite or not self._may_retry(tried, instance_id):
                    raise
            else:
                return self._decode_result(result, result_type)

    def _decode_result(self, result: bytes, result_type: type[T]) -> T:
        try:
            return msgspec.msgpack.decode(result, type=result_type)
        except UNDECODABLE as error:
            raise RemoteProtocolError(f"the result does not decode: {error}") from error

    # --- one streaming request, attempt by attempt ---

    async def _dispatch(
        self,
        held: ExitStack,
        context: Context,
        payload: bytes,
        *,
        instance_id: str | None,
        among: Container[str] | None = None,
        takes_input: bool = False,
    ) -> _StreamAttempt:
        tried: list[str] = []
        failed: TrinamoError | None = None
        while True:
            instance = self._choose(instance_id, tried, failed, among)
            tried.append(instance.id)
            add_fields(instance_id=instance.id)
            with ExitStack() as own:
                registration = own.enter_context(self._response_plane.register(context))
                attempt = _StreamAttempt(instance, registration, context, self._call_home_timeout_s)
                own.enter_context(self.router.flight(instance, attempt))
                if takes_input:
                    attempt.input = own.enter_context(self._response_plane.register_input(context))
                envelope = Envelope(
                    id=attempt_id(context.id, self._env.rng),
                    endpoint=instance.endpoint,
                    instance_id=instance.id,
                    response=registration.connection,
                    request=None if attempt.input is None else attempt.input.connection,
                )
                try:
                    await attempt.run(*self._route(instance), envelope, payload)
                except _ELSEWHERE as error:
                    failed = error
                    self._blame(instance, error)
                    if context.is_stopped or not self._may_retry(tried, instance_id):
                        raise
                else:
                    held.push(own.pop_all())
                    self.router.restore(instance)
                    return attempt

    def _choose(
        self,
        instance_id: str | None,
        tried: list[str],
        failed: TrinamoError | None,
        among: Container[str] | None = None,
    ) -> Instance:
        try:
            return self.router.choose(instance_id=instance_id, exclude=tried, among=among)
        except UnavailableError:
            # The reason of the last attempt says more than "nobody is left".
            if failed is not None:
                raise failed from None
            raise

    def _route(self, instance: Instance) -> tuple[RequestPlane, str]:
        route = self.router.route(instance)
        if route is None:
            spoken = ", ".join(instance.transports) or "nothing"
            raise UnavailableError(
                f"instance {instance.id} speaks {spoken}, which is not spoken here"
            )
        return route

    def _may_retry(self, tried: list[str], instance_id: str | None) -> bool:
        return instance_id is None and len(tried) < self._attempts_max

    def _blame(self, instance: Instance, error: TrinamoError) -> None:
        if isinstance(error, (ConnectError, DisconnectedError)):
            self.router.inhibit(instance)
        elif isinstance(error, RemoteProtocolError):
            self.router.inhibit(instance, is_nonsensical=True)


class _UnaryAttempt(InFlight):
    """One unary request at one instance."""

    __slots__ = ("_error", "_waiting")

    def __init__(self) -> None:
        # Its only item is the answer, which a worker that leaves may still give.
        super().__init__(is_waiting=False)
        self._waiting = trio.CancelScope()
        self._error: DisconnectedError | None = None

    async def run(
        self, plane: RequestPlane, address: str, envelope: Envelope, payload: bytes
    ) -> bytes:
        """The answer, unless the worker is silent and taken for lost before that."""
        with self._waiting:
            return await plane.call(address, envelope, payload)
        assert self._error is not None
        raise self._error

    def heard(self) -> int:
        return 0

    def fail(self, error: DisconnectedError) -> None:
        self._error = error
        self._waiting.cancel()


class _StreamAttempt(InFlight):
    """One streaming request at one instance; once it has begun, its stream."""

    __slots__ = (
        "_call_home_timeout_s",
        "_context",
        "_error",
        "_sending",
        "channel",
        "input",
        "instance",
    )

    def __init__(
        self,
        instance: Instance,
        registration: Registration,
        context: Context,
        call_home_timeout_s: float,
    ) -> None:
        super().__init__(is_waiting=True)
        self.instance = instance
        self.channel = registration.channel
        self.input: InputRegistration | None = None
        self._context = context
        self._call_home_timeout_s = call_home_timeout_s
        self._sending: trio.CancelScope | None = None
        """Until the ACK has come."""
        self._error: DisconnectedError | None = None

    async def run(
        self, plane: RequestPlane, address: str, envelope: Envelope, payload: bytes
    ) -> None:
        """Deliver the request; returns once the handler has started."""
        await self._deliver(plane, address, envelope, payload)
        if not self.channel.is_called:
            await self._wait_called()
        await self.channel.wait_prologue()
        # From here on the connection itself tells better whether the worker lives, and one that
        # left discovery is given up only if it has fallen silent too.
        self.is_waiting = False

    def heard(self) -> int | None:
        """What has come: the worker's call, its prologue, and batches of items.

        Until its ACK a request is not at the worker; how long that takes, the request plane bounds.
        """
        if self._sending is not None or self.channel.is_paused:
            return None
        return self.channel.is_called + (not self.is_waiting) + self.channel.arrival_count

    def fail(self, error: DisconnectedError) -> None:
        self._error = error
        if self._sending is not None:
            self._sending.cancel()
        else:
            self.channel.fail(error)

    async def _deliver(
        self, plane: RequestPlane, address: str, envelope: Envelope, payload: bytes
    ) -> None:
        ack: Answer | None = None
        with self._context.cancelled_by_kill() as self._sending:
            ack = await plane.send(address, envelope, payload)
        self._sending = None
        if ack is not None:
            raise_for_nack(ack)
        elif self._context.is_killed:
            reason = self._context.reason or Reason.CONSUMER_DROPPED
            raise KilledError(f"the request was killed: {reason}", reason=reason)
        if self._error is not None:
            raise self._error

    async def _wait_called(self) -> None:
        """A worker calls before it works, so this wait, unlike the next, has a bound.

        Otherwise a link cut between the ACK and the call would leave us waiting for a worker
        that has long given up.
        """
        with trio.move_on_after(self._call_home_timeout_s):
            await self.channel.wait_called()
            return
        raise DisconnectedError(
            f"instance {self.instance.id} accepted the request but did not call home "
            f"within {self._call_home_timeout_s:g} s"
        )
