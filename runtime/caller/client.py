"""The caller's end: one request out, one response stream in.

`Client.stream` chooses an instance, delivers the envelope, and waits for the worker to open the
stream and for its prologue, watching all the while the request's context, the instance's presence in
discovery, and the connection. Until the first item has come, a failed attempt is tried on another
instance; after that the stream belongs to its worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

import attrs
import msgspec

from ..config.router import RouterConfig
from ..context import Context
from ..deadlines import Deadlines
from ..env import Env, draw_id
from ..errors import (
    KilledError,
    RemoteProtocolError,
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
from ..traces.ring import Traces
from ..traces.trace import NO_TRACE, Leg
from .attempts import StreamAttempt, UnaryAttempt, check_killed
from .deadline import Bound, left_s, within
from .router import Router
from .search import ELSEWHERE, Among, Patience, Search
from .streams import Exchange, ResponseStream

T = TypeVar("T")
S = TypeVar("S")
_DECODERS_MAX: Final = 64
"""More types of items are not asked for at one endpoint, unless they are made up on the way."""


class Client:
    """Calls one endpoint, over whatever request planes its instances speak."""

    def __init__(
        self,
        router: Router,
        response_plane: ResponsePlane,
        env: Env,
        *,
        attempts_max: int = 3,
        opening_timeout_s: float = 5.0,
        traces: Traces | None = None,
    ) -> None:
        self.router = router
        self._response_plane = response_plane
        self.env = env
        self._attempts_max = attempts_max
        self._traces = traces or Traces(env.clock, 0)
        self._openings = Deadlines(opening_timeout_s, StreamAttempt.give_up_opening)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}

    def tune(self, section: RouterConfig) -> None:
        """Choose, and try elsewhere, as `section` says from now on."""
        self._attempts_max = section.attempts_max
        self.router.tune(section)

    async def run(self) -> None:
        """Give up workers that have a request and do not open its stream, until cancelled.

        A worker opens it before it works, so that wait, unlike the one for its prologue, has a bound.
        """
        await self._openings.run()

    def new_id(self) -> str:
        """A request id, for callers that have none of their own."""
        return draw_id(self.env.rng)

    def stream(
        self,
        request: Any,
        item_type: type[T],
        *,
        context: Context | None = None,
        timeout_s: float | None = None,
        deadline: float = math.inf,
        instance_id: str | None = None,
        among: Among = None,
        hint: RoutingHint | None = None,
        patience: Patience | None = None,
    ) -> AbstractAsyncContextManager[ResponseStream[T]]:
        """Send `request` and yield its stream once the handler has started.

        Attempts go to `attempts_max` instances at most, none twice, and with `among` to those ids
        only; a named `instance_id` is the only one tried. `hint` is what the
        policy `kv` is told about the prompt. Raises `UnavailableError` if nobody is live, with `patience` only
        after `router.wait_s`, else the last attempt's error.

        The whole answer must be there `timeout_s` after this is entered, by `deadline` on trio's
        clock, and by `context.deadline`, whichever comes first. It travels: the handler finds it as
        its own `context.deadline`. After it every wait on the stream raises `DeadlineError`, and
        both ends have `Reason.DEADLINE`; `context` itself lives on.
        """

        def found(attempt: StreamAttempt) -> ResponseStream[T]:
            decoder = self._decoder(item_type)
            stream = ResponseStream(attempt, decoder, self.router)
            if hint is not None:
                stream.cached_blocks = attempt.cached_blocks
                stream.tell_first(partial(self.router.first_item, attempt))
            return stream

        asked = Asked(self._encode(request), instance_id, among, hint, patience=patience)
        return _Opening(self, asked, context, Bound(timeout_s, deadline), found)

    def exchange(
        self,
        request: Any,
        item_type: type[T],
        *,
        context: Context | None = None,
        timeout_s: float | None = None,
        deadline: float = math.inf,
        instance_id: str | None = None,
    ) -> AbstractAsyncContextManager[Exchange[T]]:
        """As `stream`, of an endpoint that is also streamed to; `send` its input, then `finish`.

        No input is sent before a worker has the request, so attempts go to other instances as those
        of `stream` do.
        """

        def found(attempt: StreamAttempt) -> Exchange[T]:
            return Exchange(attempt, self._decoder(item_type), self.router)

        asked = Asked(self._encode(request), instance_id, takes_input=True)
        return _Opening(self, asked, context, Bound(timeout_s, deadline), found)

    async def call(
        self,
        request: Any,
        result_type: type[T],
        *,
        context: Context | None = None,
        timeout_s: float | None = None,
        deadline: float = math.inf,
        instance_id: str | None = None,
    ) -> T:
        """One value for one request, without a response stream.

        Tried elsewhere only if it certainly did not run. `timeout_s`, `deadline` and
        `context.deadline` bound it as they bound a `stream`: raises `DeadlineError` then, and
        `KilledError` once `context` was killed, having told the worker to forget it, and why.
        """
        payload = self._encode(request)
        asking, leg = self.begin(context)
        with leg:
            limited = Bound(timeout_s, deadline).limit(asking)
            try:
                with limited.cancelled_by_kill():
                    call = partial(self._call, payload, instance_id, limited)
                    result = await within(limited, call)
                    return self._decode_result(result, result_type)
                reason = limited.why_left()
                raise KilledError(f"the request was killed: {reason}", reason=reason)
            finally:
                if limited is not asking:
                    limited.close()

    def begin(self, context: Context | None) -> tuple[Context, Leg]:
        """The context of a request, and its leg here; whoever gave one writes its legs himself."""
        if context is not None:
            return context, NO_TRACE.begin("caller")
        context = Context(self.new_id())
        context.trace = self._traces.begin(context.id)
        return context, context.trace.begin("caller", endpoint=str(self.router.endpoint))

    async def _call(self, payload: bytes, instance_id: str | None, context: Context) -> bytes:
        check_killed(context)
        search = Search(
            self.router, context, attempts_max=self._attempts_max, instance_id=instance_id
        )
        while True:
            instance = await search.choose()
            add_fields(instance_id=instance.id)
            attempt = UnaryAttempt(context)
            try:
                with (
                    context.trace.begin("attempt", instance=instance.id) as leg,
                    self.router.flight(instance, attempt),
                ):
                    envelope = Envelope(
                        id=attempt_id(context.id, self.env.rng),
                        endpoint=instance.endpoint,
                        instance_id=instance.id,
                        kind=RequestKind.UNARY,
                        deadline_s=left_s(context),
                        traceparent=leg.traceparent or context.traceparent,
                    )
                    return await attempt.run(*self._route(instance), envelope, payload)
            except ELSEWHERE as error:
                search.fail(instance, error)
                if not error.definite:
                    raise

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

    async def dispatch(self, asked: Asked, context: Context) -> StreamAttempt:
        """The attempt that succeeded; whoever gets it closes it."""
        search = Search(
            self.router,
            context,
            attempts_max=self._attempts_max,
            payload_bytes=len(asked.payload),
            instance_id=asked.instance_id,
            among=asked.among,
            hint=asked.hint,
            patience=asked.patience,
        )
        while True:
            instance = await search.choose()
            add_fields(instance_id=instance.id)
            attempt = StreamAttempt(
                instance,
                context,
                self._response_plane,
                self._openings,
                self.router,
                asked.hint,
                len(asked.payload),
            )
            try:
                await attempt.run(
                    *self._route(instance), self._envelope(attempt, asked), asked.payload
                )
            except ELSEWHERE as error:
                attempt.close(error)
                search.fail(instance, error)
            except BaseException as error:
                attempt.close(error)
                raise
            else:
                self.router.restore(instance)
                return attempt

    def _envelope(self, attempt: StreamAttempt, asked: Asked) -> Envelope:
        return Envelope(
            id=attempt_id(attempt.context.id, self.env.rng),
            endpoint=attempt.instance.endpoint,
            instance_id=attempt.instance.id,
            response=attempt.registration.connection,
            request=attempt.open_input() if asked.takes_input else None,
            deadline_s=left_s(attempt.context),
            traceparent=attempt.traceparent,
        )

    def _route(self, instance: Instance) -> tuple[RequestPlane, str]:
        route = self.router.route(instance)
        if route is None:
            spoken = ", ".join(instance.transports) or "nothing"
            raise UnavailableError(
                f"instance {instance.id} speaks {spoken}, which is not spoken here"
            )
        return route


@attrs.frozen
class Asked:
    """One streaming request."""

    payload: bytes
    instance_id: str | None
    among: Among = None
    hint: RoutingHint | None = None
    takes_input: bool = False
    patience: Patience | None = None


class _Opening(Generic[S]):
    """An `async with` over one streaming request."""

    __slots__ = ("_asked", "_attempt", "_bound", "_child", "_client", "_context", "_found", "_leg")

    def __init__(
        self,
        client: Client,
        asked: Asked,
        context: Context | None,
        bound: Bound,
        found: Callable[[StreamAttempt], S],
    ) -> None:
        self._client, self._asked, self._found = client, asked, found
        self._context, self._bound = context, bound
        self._child: Context | None = None
        """Ours alone, and to be closed: what a bound of this call ends."""

    async def __aenter__(self) -> S:
        asking, self._leg = self._client.begin(self._context)
        context = self._bound.limit(asking)
        self._child = None if context is asking else context
        try:
            opening = partial(self._client.dispatch, self._asked, context)
            self._attempt = await within(context, opening)
        except BaseException as error:
            self._close(error)
            raise
        return self._found(self._attempt)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._attempt.close(exc)
        self._close(exc)

    def _close(self, error: BaseException | None) -> None:
        self._leg.leave(error)
        if self._child is not None:
            self._child.close()
