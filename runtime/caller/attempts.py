"""One attempt of a request at one instance, from its envelope to its end.

Which instance is tried, and which after that, is `search.py`'s business. While an attempt waits,
the liveness of its instance is watched (`liveness.py`), and what is found out ends the wait.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import trio

from ..context import Context
from ..deadlines import Deadlines
from ..errors import DisconnectedError, KilledError, RemoteProtocolError, TrinamoError
from ..planes import InputRegistration, PostedRequest, ResponsePlane
from ..protocol.discovery.instances import Instance
from ..protocol.discovery.presence import InFlight
from ..protocol.streams.request import Envelope, RequestAnswer, attempt_id, raise_for_nack
from ..protocol.undecodable import UNDECODABLE, decoding_fault
from ..sinks import Sink
from .router import Router
from .search import Asked


class Attempt(InFlight):
    """One streaming request at one instance, counted as under way there until `close`.

    At a worker it is a `StreamAttempt`, at another server of OpenAI's API an `UpstreamAttempt`.
    """

    def __init__(self, instance: Instance, context: Context, router: Router, asked: Asked) -> None:
        super().__init__(is_waiting=True, payload_bytes=len(asked.payload))
        self.cached_blocks = router.begin(instance, self, asked.hint)
        """Of the prompt, at the instance; None if that is not known."""
        self.instance, self.context = instance, context
        self._asked, self._router = asked, router
        self._leg = context.trace.begin("attempt", instance=instance.id)

    @abstractmethod
    async def run(self) -> None:
        """Deliver the request; returns once the instance has begun to answer."""

    @abstractmethod
    async def forward(self, sink: Sink[Any]) -> None:
        """Hand every item to `sink`; returns at the end, or raises what ended the answer."""

    def begun(self) -> None:
        """The instance answers: that discovery does not name it any more ends nothing from here on."""
        self.is_waiting = False
        self._leg.mark("begun")

    def close(self, error: BaseException | None = None) -> None:
        """It is over, and with `error` failed: whoever still works for it is told. Synchronous."""
        self._leg.leave(error)
        self._router.end(self.instance, self)


class StreamAttempt(Attempt):
    """One streaming request at one worker; once it has begun, its stream.

    It waits in one place, the stream's channel: for the worker to open the stream, or to refuse it,
    and for the prologue.
    """

    def __init__(
        self,
        instance: Instance,
        context: Context,
        router: Router,
        asked: Asked,
        plane: ResponsePlane,
        openings: Deadlines[StreamAttempt],
        rng: random.Random,
    ) -> None:
        self.registration = plane.register(context)
        self.channel = self.registration.channel
        self.channel.on_call = asked.accepted
        try:
            super().__init__(instance, context, router, asked)
        except BaseException:
            self.registration.close()
            raise
        self.input: InputRegistration | None = None
        self._plane, self._openings, self._rng = plane, openings, rng
        self._delivery: PostedRequest | None = None
        self._sending: trio.CancelScope | None = None
        """While it waits for room."""
        self._error: DisconnectedError | None = None

    def close(self, error: BaseException | None = None) -> None:
        """It is over; the worker is told to end what it still does."""
        super().close(error)
        self._openings.end(self)
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            delivery.cancel(self.context.why_left())
        if self.input is not None:
            self.input.close()
        self.registration.close()

    async def run(self) -> None:
        """See `Attempt`: the prologue is the beginning, which comes with the first item, or before input."""
        context, instance, payload = self.context, self.instance, self._asked.payload
        plane, address = self._router.route(instance)
        if self._asked.takes_input:
            self.input = self._plane.register_input(context)
        envelope = Envelope(
            id=attempt_id(context.id, self._rng),
            endpoint=instance.endpoint,
            instance_id=instance.id,
            response=self.registration.connection,
            request=None if self.input is None else self.input.connection,
            deadline_s=context.left_s(),
            traceparent=self._leg.traceparent or context.trace.traceparent,
        )
        check_killed(context)
        while (delivery := plane.post(address, envelope, payload, self._take)) is None:
            with context.cancelled_by_kill() as self._sending:
                await plane.wait_room(address)
            self._sending = None
            if self._error is not None:
                raise self._error
            check_killed(context)
        self._delivery = delivery
        if not plane.acknowledges:
            self._openings.begin(self)
        await self.channel.wait_prologue()
        # From here on the connection itself tells better whether the worker lives, and one that
        # left discovery is given up only if it has fallen silent too.
        self.begun()
        self._openings.end(self)
        # Whoever has begun has accepted, and hears of an end by the stream.
        delivery.forget()
        self._delivery = None

    async def forward(self, sink: Sink[Any]) -> None:
        """See `Attempt`; items are decoded as they come."""
        await self.channel.forward(_Decoding(self._asked.decode, sink))

    def decode(self, item: bytes) -> Any:
        """One item of the channel, for who iterates it instead of `forward`."""
        try:
            return self._asked.decode(item)
        except UNDECODABLE as error:
            raise _undecodable(error) from error

    @property
    def has_items(self) -> bool:
        """See `InFlight`."""
        return self.channel.arrival_count > 0

    def heard(self) -> int | None:
        """What has come: the stream, its prologue, and batches of items.

        How long a request may be at the worker before that is bounded otherwise.
        """
        channel = self.channel
        if channel.is_paused or not channel.is_called:
            return None
        return 1 + (not self.is_waiting) + channel.arrival_count

    def fail(self, error: DisconnectedError) -> None:
        self._error = error
        if self._sending is not None:
            self._sending.cancel()
        else:
            self.channel.fail(error)

    def give_up_opening(self) -> None:
        """The worker has the request, and has not opened its stream in time."""
        if not self.channel.is_called:
            self.channel.fail(
                DisconnectedError(
                    f"instance {self.instance.id} had the request and neither opened its stream nor "
                    f"refused it within {self._openings.timeout_s:g} s"
                )
            )

    def _take(self, answer: RequestAnswer | TrinamoError, _: bytes = b"") -> None:
        """A NACK, why there will be no answer, or the ACK of a worker that calls home."""
        try:
            if isinstance(answer, TrinamoError):
                raise answer
            raise_for_nack(answer.ack)
        except TrinamoError as error:
            self.channel.fail(error)
        else:
            self._openings.begin(self)


class _Decoding(Sink[bytes]):
    """Decodes items for another sink. One that does not decode comes after those before it."""

    __slots__ = ("_decode", "_sink")

    def __init__(self, decode: Callable[[bytes], Any], sink: Sink[Any]) -> None:
        super().__init__()
        self._decode, self._sink = decode, sink

    def on_room(self, listener: Callable[[], None]) -> None:
        self._sink.on_room(listener)

    def take(self, items: list[bytes]) -> bool:
        decoded: list[Any] = []
        try:
            for item in items:
                decoded.append(self._decode(item))  # noqa: PERF401 -- those before a bad one count
        except UNDECODABLE as error:
            if decoded:
                self._sink.take(decoded)
            raise _undecodable(error) from error
        return self._sink.take(decoded)


def _undecodable(error: Exception) -> RemoteProtocolError:
    return RemoteProtocolError(f"an item does not decode: {decoding_fault(error)}")


def check_killed(context: Context) -> None:
    """Raise `KilledError` if nobody wants an answer any more."""
    if context.is_killed:
        reason = context.why_left()
        raise KilledError(f"the request was killed: {reason}", reason=reason)
