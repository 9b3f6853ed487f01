"""The caller's end: one request out, one response stream in.

`Client.stream` chooses an instance, delivers the envelope, and waits for the ACK, the worker's
call and its prologue, watching all the while the request's context, the instance's presence in
discovery, and the connection. Until the first item has come, a failed attempt is tried on another
instance; after that the stream belongs to its worker.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Container
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

import attrs
import msgspec
import trio

from ..context import Context
from ..deadlines import Deadlines
from ..env import Env
from ..errors import (
    ConnectError,
    DeadlineError,
    DisconnectedError,
    OverloadedError,
    RemoteProtocolError,
    TransportError,
    TrinamoError,
    UnavailableError,
)
from ..logs.fields import add_fields
from ..planes import RequestPlane, ResponsePlane
from ..protocol.discovery.instances import Instance
from ..protocol.kv.hints import RoutingHint
from ..protocol.streams.request import (
    Envelope,
    RequestKind,
    attempt_id,
)
from ..protocol.undecodable import UNDECODABLE
from .attempts import StreamAttempt, UnaryAttempt
from .router import Router
from .streams import Exchange, ResponseStream

__all__ = ["ELSEWHERE", "Client"]

T = TypeVar("T")
S = TypeVar("S")
_ID_BITS: Final = 64
_DECODERS_MAX: Final = 64
"""More types of items are not asked for at one endpoint, unless they are made up on the way."""
ELSEWHERE: Final = (TransportError, RemoteProtocolError, OverloadedError, UnavailableError)
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
        self.env = env
        self._attempts_max = attempts_max
        self._calls = Deadlines(call_home_timeout_s, StreamAttempt.give_up_call)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}

    async def run(self) -> None:
        """Give up workers that accept a request and do not call home, until cancelled.

        A worker calls before it works, so that wait, unlike the one for its prologue, has a bound.
        Otherwise a link cut between the ACK and the call would leave a caller waiting for a worker
        that has long given up.
        """
        await self._calls.run()

    def new_id(self) -> str:
        """A request id, for callers that have none of their own."""
        return f"{self.env.rng.getrandbits(_ID_BITS):016x}"

    def stream(
        self,
        request: Any,
        item_type: type[T],
        *,
        context: Context | None = None,
        instance_id: str | None = None,
        among: Container[str] | None = None,
        migrates: bool = False,
        hint: RoutingHint | None = None,
    ) -> AbstractAsyncContextManager[ResponseStream[T]]:
        """Send `request` and yield its stream once the handler has started.

        Attempts go to `attempts_max` instances at most, none twice, and with `among` to those ids
        only; a named `instance_id` is the only one tried. With `migrates` the worker may hand the
        stream over when it leaves: the caller will ask another one. `hint` is what the policy `kv`
        is told about the prompt. Raises `UnavailableError` if nobody is live, `DeadlineError` once
        `context.deadline` is over, else the last attempt's error.
        """

        def found(attempt: StreamAttempt) -> ResponseStream[T]:
            decoder = self._decoder(item_type)
            stream = ResponseStream(attempt.channel, decoder, self.router, attempt.instance)
            if hint is not None:
                stream.cached_blocks = attempt.cached_blocks
                stream.tell_first(partial(self.router.first_item, attempt))
            return stream

        context = context or Context(self.new_id())
        payload = self._encode(request)
        asked = _Asked(context, payload, instance_id, among, hint, migrates=migrates)
        return _Opening(self._dispatch, asked, found)

    def exchange(
        self,
        request: Any,
        item_type: type[T],
        *,
        context: Context | None = None,
        instance_id: str | None = None,
    ) -> AbstractAsyncContextManager[Exchange[T]]:
        """As `stream`, of an endpoint that is also streamed to; `send` its input, then `finish`.

        No input is sent before a worker has the request, so attempts go to other instances as those
        of `stream` do.
        """

        def found(attempt: StreamAttempt) -> Exchange[T]:
            assert attempt.input is not None
            decoder = self._decoder(item_type)
            return Exchange(attempt.channel, decoder, self.router, attempt.instance, attempt.input)

        context = context or Context(self.new_id())
        asked = _Asked(context, self._encode(request), instance_id, takes_input=True)
        return _Opening(self._dispatch, asked, found)

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
                attempt = UnaryAttempt()
                with self.router.flight(instance, attempt):
                    result = await attempt.run(plane, address, envelope, payload)
            except ELSEWHERE as error:
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

    def _decoder(self, item_type: Any) -> msgspec.msgpack.Decoder[Any]:
        decoder = self._decoders.get(item_type)
        if decoder is None:
            if len(self._decoders) >= _DECODERS_MAX:
                self._decoders.clear()
            decoder = self._decoders[item_type] = msgspec.msgpack.Decoder(item_type)
        return decoder

    # --- one streaming request, attempt by attempt ---

    async def _dispatch(self, asked: _Asked) -> StreamAttempt:
        """The attempt that succeeded; whoever gets it closes it."""
        tried: list[str] = []
        failed: TrinamoError | None = None
        while True:
            instance = self._choose(asked.instance_id, tried, failed, asked.among, asked.hint)
            tried.append(instance.id)
            add_fields(instance_id=instance.id)
            attempt = StreamAttempt(
                instance, asked.context, self._response_plane, self._calls, self.router, asked.hint
            )
            try:
                await attempt.run(
                    *self._route(instance), self._envelope(attempt, asked), asked.payload
                )
            except ELSEWHERE as error:
                attempt.close(error)
                failed = error
                self._blame(instance, error)
                if asked.context.is_stopped or not self._may_retry(tried, asked.instance_id):
                    raise
            except BaseException as error:
                attempt.close(error)
                raise
            else:
                self.router.restore(instance)
                return attempt

    def _envelope(self, attempt: StreamAttempt, asked: _Asked) -> Envelope:
        return Envelope(
            id=attempt_id(asked.context.id, self.env.rng),
            endpoint=attempt.instance.endpoint,
            instance_id=attempt.instance.id,
            response=attempt.registration.connection,
            request=attempt.open_input() if asked.takes_input else None,
            migrates=asked.migrates,
            deadline_s=_left(asked.context),
        )

    def _choose(
        self,
        instance_id: str | None,
        tried: list[str],
        failed: TrinamoError | None,
        among: Container[str] | None = None,
        hint: RoutingHint | None = None,
    ) -> Instance:
        try:
            return self.router.choose(
                instance_id=instance_id, exclude=tried, among=among, hint=hint
            )
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


def _left(context: Context) -> float:
    """Seconds until the deadline of a request, 0 for one that has none."""
    if context.deadline == math.inf:
        return 0.0
    left = context.deadline - trio.current_time()
    if left <= 0:
        raise DeadlineError("the request's time was up before a worker had it")
    return left


@attrs.frozen
class _Asked:
    """One streaming request."""

    context: Context
    payload: bytes
    instance_id: str | None
    among: Container[str] | None = None
    hint: RoutingHint | None = None
    takes_input: bool = False
    migrates: bool = False
    """The caller asks another instance if this one hands the stream over."""


class _Opening(Generic[S]):
    """An `async with` over one streaming request."""

    __slots__ = ("_asked", "_attempt", "_dispatch", "_found")

    def __init__(
        self,
        dispatch: Callable[[_Asked], Awaitable[StreamAttempt]],
        asked: _Asked,
        found: Callable[[StreamAttempt], S],
    ) -> None:
        self._dispatch, self._asked, self._found = dispatch, asked, found

    async def __aenter__(self) -> S:
        self._attempt = await self._dispatch(self._asked)
        return self._found(self._attempt)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._attempt.close(exc)
