"""The caller's end: one request out, one response stream in.

Entered, what `Client.stream` returns chooses an instance (`search.py`), delivers the request
(`attempts.py`), and waits for the instance to begin its answer, watching all the while the request's
context, the instance's presence in discovery, and the connection. Until the answer begins, a failed
attempt is tried on another instance; after that the stream belongs to its instance (an answer may go
on in another one: `migration.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import msgspec
import trio

from ..config.router import RouterConfig
from ..context import Context
from ..deadlines import Deadlines
from ..env import Env, draw_id
from ..errors import (
    DisconnectedError,
    KilledError,
    RemoteProtocolError,
    UpstreamError,
)
from ..logs.fields import add_fields
from ..planes import InputRegistration, ResponsePlane
from ..protocol.discovery.instances import Instance
from ..protocol.kv.names import RoutingHint
from ..protocol.streams.request import Envelope, RequestKind, attempt_id, raise_for_nack
from ..protocol.undecodable import UNDECODABLE, decoding_fault
from ..sinks import Sink
from ..traces.ring import Traces
from ..traces.trace import NO_TRACE, Leg
from .attempts import Attempt, StreamAttempt, check_killed
from .router import Router
from .search import ELSEWHERE, Among, Asked, Patience, Search
from .unary import UnaryAttempt

T = TypeVar("T")
_ITS_FAULT: Final = (DisconnectedError, RemoteProtocolError, UpstreamError)
"""Errors of an answer that has begun which may be its instance's fault."""
_DECODERS_MAX: Final = 64
"""More types of items are not asked for at one endpoint, unless they are made up on the way."""


class Client:
    """Calls one endpoint, over whatever request planes its instances speak."""

    def __init__(
        self,
        router: Router,
        response_plane: ResponsePlane | None,
        env: Env,
        *,
        attempts_max: int = 3,
        opening_timeout_s: float = 5.0,
        traces: Traces | None = None,
    ) -> None:
        self.router = router
        self._response_plane = response_plane
        self.env = env
        self.attempts_max = attempts_max
        self._traces = traces or Traces(env.clock, 0)
        self._openings = Deadlines(opening_timeout_s, StreamAttempt.give_up_opening)
        self.encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
        self._decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}

    def tune(self, section: RouterConfig) -> None:
        """Choose, and try elsewhere, as `section` says from now on."""
        self.attempts_max = section.attempts_max
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
        accepted: Callable[[], None] | None = None,
    ) -> ResponseStream[T]:
        """Send `request` and yield its stream once its answer has begun.

        Attempts go to `attempts_max` instances at most, none twice but one that was lost and is well again, and with `among` to those ids
        only; a named `instance_id` is the only one tried. `hint` is what the
        policy `kv` is told about the prompt, and `accepted` called when a worker has taken the request,
        which may be long before it begins to answer. Raises `UnavailableError` if nobody is live, with `patience` only
        after `router.wait_s`, else the last attempt's error.

        The whole answer must be there `timeout_s` after this is entered, by `deadline` on trio's
        clock, and by `context.deadline`, whichever comes first. It travels: the handler finds it as
        its own `context.deadline`. After it every wait on the stream raises `DeadlineError`, and
        both ends have `Reason.DEADLINE`; `context` itself lives on.
        """
        asked = Asked(
            request,
            self.encode(request),
            self._decoder(item_type).decode,
            instance_id=instance_id,
            among=among,
            hint=hint,
            patience=patience,
            accepted=accepted,
        )
        return ResponseStream(self, asked, context, timeout_s, deadline)

    def exchange(
        self,
        request: Any,
        item_type: type[T],
        *,
        context: Context | None = None,
        timeout_s: float | None = None,
        deadline: float = math.inf,
        instance_id: str | None = None,
    ) -> Exchange[T]:
        """As `stream`, of an endpoint that is also streamed to; `send` its input, then `finish`.

        No input is sent before a worker has the request, so attempts go to other instances as those
        of `stream` do.
        """
        asked = Asked(
            request,
            self.encode(request),
            self._decoder(item_type).decode,
            instance_id=instance_id,
            takes_input=True,
        )
        return Exchange(self, asked, context, timeout_s, deadline)

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
        asked = Asked(request, self.encode(request), instance_id=instance_id)
        ours, leg = self.begin(context, timeout_s, deadline)
        with leg:
            try:
                with ours.in_time(), ours.cancelled_by_kill():
                    result = await self._call(asked, ours)
                    try:
                        return msgspec.msgpack.decode(result, type=result_type)
                    except UNDECODABLE as error:
                        said = f"the result does not decode: {decoding_fault(error)}"
                        raise RemoteProtocolError(said) from error
                reason = ours.why_left()
                raise KilledError(f"the request was killed: {reason}", reason=reason)
            finally:
                if ours is not context:
                    ours.close()

    def begin(
        self, given: Context | None, timeout_s: float | None, deadline: float
    ) -> tuple[Context, Leg]:
        """The context of a request, to be closed unless it is the one `given`, and its leg here.

        Whoever gave one writes its legs himself. A bound of this call alone ends a child of it.
        """
        if timeout_s is not None:
            deadline = min(deadline, trio.current_time() + timeout_s)
        leg = NO_TRACE.begin("caller")
        context = given
        if context is None:
            context = Context(self.new_id())
            context.trace = self._traces.begin(context.id)
            leg = context.trace.begin("caller", endpoint=str(self.router.endpoint))
        elif deadline < math.inf:
            context = Context(context.id, parent=context)
        if deadline < math.inf:
            context.limit(deadline)
        return context, leg

    def attempt(self, instance: Instance, context: Context, asked: Asked) -> Attempt:
        """An attempt of a streaming request, which is to be run and closed."""
        assert self._response_plane is not None, "of whoever asks workers"
        return StreamAttempt(
            instance,
            context,
            self.router,
            asked,
            self._response_plane,
            self._openings,
            self.env.rng,
        )

    async def _call(self, asked: Asked, context: Context) -> bytes:
        check_killed(context)
        search = Search(self.router, context, asked, self.attempts_max)
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
                        deadline_s=context.left_s(),
                        traceparent=leg.traceparent or context.traceparent,
                    )
                    route = self.router.route(instance)
                    answer, result = await attempt.run(*route, envelope, asked.payload)
                    raise_for_nack(answer)
                    return result
            except ELSEWHERE as error:
                search.fail(instance, error)
                if not error.definite:
                    raise

    def _decoder(self, item_type: Any) -> msgspec.msgpack.Decoder[Any]:
        decoder = self._decoders.get(item_type)
        if decoder is None:
            if len(self._decoders) >= _DECODERS_MAX:
                self._decoders.clear()
            decoder = self._decoders[item_type] = msgspec.msgpack.Decoder(item_type)
        return decoder


class ResponseStream(Generic[T]):
    """One streaming request: entering it finds who answers, then come the items, and one end.

    That is the complete end, or one `TrinamoError`. Leaving the `async with`, at any point and for
    any reason, kills what is left.
    """

    def __init__(
        self,
        client: Client,
        asked: Asked,
        context: Context | None,
        timeout_s: float | None,
        deadline: float,
    ) -> None:
        self.instance: Instance
        """Who answers, once it is entered."""
        self.cached_blocks: int | None = None
        """Leading blocks of the prompt that it had, as the policy `kv` knew; None under others."""
        self._client, self._asked, self._given = client, asked, context
        self._timeout_s, self._deadline = timeout_s, deadline

    async def __aenter__(self) -> Self:
        """Try one instance after the other until one has begun to answer."""
        client, router, asked = self._client, self._client.router, self._asked
        context, self._leg = client.begin(self._given, self._timeout_s, self._deadline)
        self._context = context
        search = Search(router, context, asked, client.attempts_max)
        attempt: Attempt | None = None
        try:
            with context.in_time():
                while True:
                    self.instance = instance = await search.choose()
                    add_fields(instance_id=instance.id)
                    try:
                        attempt = client.attempt(instance, context, asked)
                        await attempt.run()
                        break
                    except ELSEWHERE as error:
                        if attempt is not None:
                            attempt.close(error)
                            attempt = None
                        search.fail(instance, error)
        except BaseException as error:
            if attempt is not None:
                attempt.close(error)
            self._close(error)
            raise
        assert attempt is not None
        # It is sent to no other instance: an answer may take minutes, and its prompt megabytes.
        asked.payload = b""
        router.restore(instance)
        self._attempt, self.cached_blocks = attempt, attempt.cached_blocks
        return self

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
        if self._context is not self._given:
            self._context.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """The next item.

        Raises `DisconnectedError` if the worker went away (it is inhibited by then), or said
        nothing for `router.silence_grace_s` and has left discovery or does not answer
        (`liveness.py`); `KilledError` if the context was killed, `DeadlineError` once its deadline
        is over, or what the handler raised.
        """
        attempt, context = self._attempt, self._context
        assert isinstance(attempt, StreamAttempt), "an upstream's answer is forwarded"
        try:
            if context.deadline == math.inf:
                # Most have none, and items may come by the thousand.
                raw = await attempt.channel.__anext__()
            else:
                with context.in_time():
                    raw = await attempt.channel.__anext__()
            item: T = attempt.decode(raw)
            return item
        except _ITS_FAULT as error:
            self._client.router.fail(self.instance, error, self._context)
            raise

    async def forward(self, sink: Sink[T]) -> None:
        """Hand every item to `sink` as it comes, instead of iterating; returns at the end.

        Sleeps in between: `sink` is called in the turn of the connection's reader. Raises what
        iterating raises, or what `sink` does.
        """
        router, attempt = self._client.router, self._attempt
        if self._asked.hint is not None:
            sink = _Telling(sink, partial(router.first_item, attempt))
        try:
            with self._context.in_time():
                await attempt.forward(sink)
        except _ITS_FAULT as error:
            router.fail(self.instance, error, self._context)
            raise


class Exchange(ResponseStream[T]):
    """A response stream whose worker takes a stream of input as well.

    Leaving it before `finish` kills the request: half an input must not pass for a whole one.
    """

    async def send(self, item: Any) -> None:
        """Queue one input item; waits while `queue_bytes_max` bytes wait for the worker.

        A worker that waits for its answers to be read may not read, so let another task do that.
        Raises `DisconnectedError` once the worker takes no more input, be it that it has answered,
        `KilledError` once the request was stopped or killed, and `DeadlineError` once its time is
        up.
        """
        with self._context.in_time():
            await self._input.send(self._client.encode(item))

    async def finish(self) -> None:
        """Say that the input is complete; the handler's iterator ends."""
        with self._context.in_time():
            await self._input.finish()

    @property
    def _input(self) -> InputRegistration:
        assert isinstance(self._attempt, StreamAttempt)
        assert self._attempt.input is not None
        return self._attempt.input


class _Telling(Sink[T]):
    """Tells of the first items that come, and hands all on."""

    __slots__ = ("_on_first", "_sink")

    def __init__(self, sink: Sink[T], on_first: Callable[[], None]) -> None:
        super().__init__()
        self._sink = sink
        self._on_first: Callable[[], None] | None = on_first

    def on_room(self, listener: Callable[[], None]) -> None:
        self._sink.on_room(listener)

    def take(self, items: list[T]) -> bool:
        if self._on_first is not None:
            on_first, self._on_first = self._on_first, None
            on_first()
        return self._sink.take(items)
