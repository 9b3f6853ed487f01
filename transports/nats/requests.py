"""The request plane over subjects: one request is one message, its answer is the reply.

It takes any `EventPlane`, so the same code runs over NATS and over the memory broker. An address
is a subject that one worker subscribes to. Envelopes and cancels are the frames of the tcp request
plane and travel on the same subject, so a cancel cannot overtake its request. Messages are at most
once: a lost request or answer ends in the caller's deadline, and an instance that died is for the
caller to notice in discovery. Responses stream over `transports/tcp`, not over NATS.

In a cluster with a secret all of it is sealed (`transports/security/sealing.py`): a request and a cancel for
the subject, once, an answer for the request that it answers. What does not open is dropped and counted,
and answered by nothing, so whoever has only the broker's token learns nothing and ends nothing. That nobody
is subscribed he could say, too, so nothing is made of it there.

Who has not answered for a second is probed. The request is lost once nobody answers the probe, and nobody holds the
address any more, which the caller does while discovery names the instance; or once the probe is answered, and the
request that went before it was not.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

import attrs
import msgspec
import trio

from trinamo.runtime.deadlines import Deadlines
from trinamo.runtime.errors import (
    ConnectError,
    DeadlineError,
    DisconnectedError,
    EventPlaneError,
    OverloadedError,
    RemoteProtocolError,
    RequestError,
    TrinamoError,
    UnavailableError,
)
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.planes import (
    CountsEvents,
    EventPlane,
    Message,
    RequestService,
    TakeAnswer,
)
from trinamo.runtime.planes.events import check_subject
from trinamo.runtime.protocol.streams.codec import decode_frame, encode_frame
from trinamo.runtime.protocol.streams.request import (
    AckStatus,
    Envelope,
    Reason,
    RequestAnswer,
    RequestKind,
    decode_answer,
    encode_answer,
    encode_cancel,
    encode_envelope,
    failure,
)
from trinamo.runtime.worker.requests import RequestTable
from trinamo.transports.security.sealing import HEAD_BYTES, Arrivals, Sealer

_log = logging.getLogger("trinamo.nats")
_PENDING_MAX: Final = 4096

CANCEL_PATIENCE_S = 0.5
PROBE_PATIENCE_S: Final = 1.0
"""How long an instance may take to acknowledge a request before it is probed, and to answer a probe."""
HANDED_ON_S: Final = 0.05
"""How long an ACK that came before a probe's answer may need to its task."""


def about_request(address: str) -> bytes:
    """What a sealed request or cancel is about."""
    return b"request " + address.encode()


def about_answer(asked: bytes) -> bytes:
    """What the sealed answer to the sealed request `asked` is about."""
    return b"answer " + asked[:HEAD_BYTES]


class NatsRequestServer:
    """The worker's end: answers what arrives on the subject `address`.

    At most `requests_max` unary requests run at once, and the next gets the NACK `overloaded`; for
    streaming requests the service itself decides. At most `_PENDING_MAX` messages wait to be looked
    at. A malformed message is answered with the NACK `invalid`, if it can be answered, and counted; one
    that does not open is counted.
    """

    def __init__(
        self,
        events: EventPlane,
        address: str,
        *,
        sealer: Sealer,
        requests_max: int = 1024,
    ) -> None:
        self.malformed_count = 0
        self._sealer, self._once = sealer, Arrivals()
        self._events = events
        self.address = address
        """The subject callers send to."""
        self._requests_max = requests_max
        self._requests: RequestTable | None = None

    @property
    def transport(self) -> str:
        """The key of `address` in an instance's `transports`."""
        return "nats"

    @property
    def in_flight(self) -> int:
        """How many unary requests run now; zero at quiescence."""
        return 0 if self._requests is None else self._requests.unary_count

    async def serve(
        self,
        service: RequestService,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Answer until cancelled, or until the event plane is closed; unary handlers end with it.

        Started once the broker has confirmed the subscription.
        """
        async with (
            self._events.subscribe(self.address, pending_max=_PENDING_MAX) as messages,
            open_nursery() as nursery,
        ):
            self._requests = RequestTable(
                service, nursery, unary_max=self._requests_max, keeps_order=False
            )
            task_status.started()
            async for message in messages:
                await self._take(message, self._requests)

    async def _take(self, message: Message, requests: RequestTable) -> None:
        reply = None
        if message.reply:
            reply = partial(self._reply, message.reply, about_answer(message.payload))
        try:
            frame = self._sealer.open(message.payload, about_request(self.address), once=self._once)
        except RemoteProtocolError as error:
            self.malformed_count += 1
            _log.warning("request plane: a message is refused: %s", error)
            return
        try:
            header, payload = decode_frame(frame)
            answer = requests.take(header, payload, reply)
        except RemoteProtocolError as error:
            self.malformed_count += 1
            _log.warning("request plane: %s", error)
            answer = RequestAnswer(id="", status=AckStatus.INVALID, message=error.message)
        if answer is not None and reply is not None:
            await reply(answer, b"")

    async def _reply(self, to: str, about: bytes, answer: RequestAnswer, result: bytes) -> None:
        sealed = self._sealer.seal(encode_frame(encode_answer(answer), result), about)
        if len(sealed) > self._events.message_bytes_max:
            size = f"an answer of {len(sealed)} bytes; {self._events.message_bytes_max} fit"
            short = encode_frame(encode_answer(failure(answer.id, EventPlaneError(size))))
            sealed = self._sealer.seal(short, about)
        try:
            await self._events.publish(to, sealed)
        except (OverloadedError, ConnectError, RequestError) as error:
            # The caller runs into its deadline, as with any message that was lost.
            _log.warning("request %s: cannot answer: %s", answer.id, error)


class NatsRequestPlane:
    """The caller's end, with a task of `nursery` for each request that waits for its answer, and one of its own.

    `ack_timeout_s` bounds the wait for an ACK, `answer_timeout_s` that for a unary result; it is
    infinite unless given, and then the caller's own scope is the bound.
    """

    transport = "nats"
    acknowledges = True

    def __init__(
        self,
        events: EventPlane,
        nursery: trio.Nursery,
        *,
        sealer: Sealer,
        ack_timeout_s: float = 10.0,
        answer_timeout_s: float = math.inf,
    ) -> None:
        self._events, self._sealer, self.nursery = events, sealer, nursery
        self._held: Counter[str] = Counter()
        self.silences = Deadlines(PROBE_PATIENCE_S, _Delivery.doubt)
        nursery.start_soon(self.silences.run)
        self._ack_timeout_s = ack_timeout_s
        self._answer_timeout_s = answer_timeout_s

    @property
    def is_usable(self) -> bool:
        """Whether there is a connection to the broker, as far as is known."""
        events = self._events
        return not isinstance(events, CountsEvents) or events.statistics().is_connected

    async def hold(
        self,
        address: str,
        on_connected: Callable[[], None],
        *,
        instance_id: str = "",  # noqa: ARG002 -- the interface's
    ) -> None:
        """Wait for ever: there is no connection to the worker whose end could be noticed.

        Meanwhile no probe without an answer ends a request.
        """
        on_connected()
        self._held[address] += 1
        try:
            await trio.sleep_forever()
        finally:
            self._held[address] -= 1
            if not self._held[address]:
                del self._held[address]

    def post(self, address: str, envelope: Envelope, payload: bytes, take: TakeAnswer) -> _Delivery:
        """Deliver a request; raises `ConnectError` for an address that is no subject.

        `take` gets `ConnectError` if nobody listens at `address`, or the broker was away and the
        request never left, `DisconnectedError` if no ACK came and `DeadlineError` if no result did,
        `RemoteProtocolError` if what came is neither. Raises `RequestError` if the request is
        larger than a message may be.
        """
        try:
            check_subject(address)
        except RequestError as error:
            # Discovery's word, or the instance's: not the client's fault, and nothing was sent.
            raise ConnectError(f"no way to {address!r}: {error.message}") from error
        sealed = self.sealed(address, encode_envelope(envelope), payload)
        if len(sealed) > self._events.message_bytes_max:
            raise RequestError(
                f"a request of {len(sealed)} bytes; {self._events.message_bytes_max} fit"
            )
        is_unary = envelope.kind is RequestKind.UNARY
        timeout_s = self._answer_timeout_s if is_unary else self._ack_timeout_s
        delivery = _Delivery(self, address, envelope, take, timeout_s)
        self.nursery.start_soon(delivery.run, sealed)
        return delivery

    def sealed(self, address: str, header: bytes, payload: bytes = b"") -> bytes:
        """A frame as it goes to `address`."""
        return self._sealer.seal(encode_frame(header, payload), about_request(address))

    async def tell(self, address: str, header: bytes) -> None:
        """Publish a frame that has no answer; raises as `EventPlane.publish`."""
        await self._events.publish(address, self.sealed(address, header))

    async def ask(self, address: str, sealed: bytes, timeout_s: float) -> bytes:
        """The frame that answers the request `sealed`; raises as `EventPlane.request`.

        Where it is sealed, it is waited for although somebody says that nobody is subscribed.
        """
        answer = b""

        def accept(reply: Message) -> bool:
            nonlocal answer
            if reply.says_nobody and self._sealer.seals:
                return False
            try:
                answer = self._sealer.open(reply.payload, about_answer(sealed))
            except RemoteProtocolError as error:
                _log.warning("request plane: an answer is refused: %s", error)
                return False
            return True

        await self._events.request(address, sealed, timeout_s=timeout_s, accept=accept)
        return answer

    async def is_lost(self, address: str, envelope: Envelope) -> bool:
        """Whether it is certain that a request which was sent before will not be answered.

        Nobody answers a probe, and nobody holds the address; or somebody does, who would have
        acknowledged the request before it, as messages between two connections keep their order. Whoever
        is held and answers no probe is probed until either changes.
        """
        probe = msgspec.structs.replace(envelope, kind=RequestKind.PROBE)
        while True:
            sealed = self.sealed(address, encode_envelope(probe))
            asked_at = trio.current_time()
            try:
                await self.ask(address, sealed, PROBE_PATIENCE_S)
            except TrinamoError as error:
                # One that never left, and therefore brought no answer, says nothing.
                is_unanswered = isinstance(error, DeadlineError) and not error.definite
                is_unanswered |= isinstance(error, UnavailableError)
                if is_unanswered and not self._held[address]:
                    return True
                await trio.sleep_until(asked_at + PROBE_PATIENCE_S)
            else:
                if envelope.kind is RequestKind.UNARY:
                    return False  # Its answer is its result, which takes its time.
                # What came just before may still be on its way to its task.
                await trio.sleep(HANDED_ON_S)
                return True

    async def wait_room(self, address: str) -> None:  # noqa: ARG002 -- the interface's
        """Return: a broker is always asked."""
        await trio.lowlevel.checkpoint()


@attrs.define(eq=False)
class _Delivery:
    """One request under way, and who takes its answer."""

    _plane: NatsRequestPlane
    _address: str
    _envelope: Envelope
    _take: TakeAnswer | None
    _timeout_s: float
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _reason: Reason | None = Reason.CONSUMER_DROPPED
    """What the worker is told when this ends early; None: nothing."""
    _waiting: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """For the answer."""
    _probing: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    def cancel(self, reason: Reason = Reason.CONSUMER_DROPPED) -> None:
        """No answer is wanted any more; the worker is told so."""
        if self._take is not None:
            self._take, self._reason = None, reason
            self._scope.cancel()

    def forget(self) -> None:
        """No answer is wanted any more; the worker is not told, then or when the ACK is late."""
        if self._take is not None:
            self._take = self._reason = None
            self._scope.cancel()

    async def run(self, sealed: bytes) -> None:
        answer: RequestAnswer | TrinamoError
        result = b""
        with self._scope:
            try:
                answer, result = await self._ask(sealed)
            except TrinamoError as error:
                answer = error
            except trio.Cancelled:
                if self._reason is not None:
                    await self._tell_cancelled(self._reason)
                raise
            except Exception as error:  # noqa: BLE001 -- one request must not take the others along
                _log.exception("request %s: cannot be asked", self._envelope.id)
                answer = DisconnectedError(f"the request cannot be asked: {error}")
            if self._take is not None:
                take, self._take = self._take, None
                take(answer, result)

    async def _ask(self, sealed: bytes) -> tuple[RequestAnswer, bytes]:
        frame: bytes | None = None
        try:
            with self._waiting:
                self._plane.silences.begin(self)
                frame = await self._plane.ask(self._address, sealed, self._timeout_s)
        except DeadlineError as error:
            if error.definite:
                raise ConnectError(error.message) from error
            await self._tell_cancelled(Reason.DEADLINE)
            if self._envelope.kind is RequestKind.UNARY:
                raise
            # A worker acknowledges at once or not at all: this one hangs, and another may be asked.
            raise DisconnectedError(
                f"{self._address} did not answer the envelope within {self._timeout_s:g} s"
            ) from error
        except UnavailableError as nobody:
            raise ConnectError(nobody.message) from nobody
        finally:
            self._plane.silences.end(self)
            self._probing.cancel()
        if frame is None:
            # It may have been heard all the same, by one that stood still.
            await self._tell_cancelled(Reason.DEADLINE)
            raise ConnectError(f"nobody has the request that went to {self._address}")
        header, result = decode_frame(frame)
        answer = decode_answer(header)
        request_id = self._envelope.id
        is_for_us = answer.id == request_id
        if not is_for_us and not (answer.id == "" and answer.status is AckStatus.INVALID):
            raise RemoteProtocolError(f"an answer to {answer.id!r} came for {request_id!r}")
        return answer, result

    def doubt(self) -> None:
        """Find out whether somebody has the request; the wait ends once it is certain that nobody has."""
        self._plane.nursery.start_soon(self._probe)

    async def _probe(self) -> None:
        with self._probing:
            if await self._plane.is_lost(self._address, self._envelope):
                self._waiting.cancel()

    async def _tell_cancelled(self, reason: Reason) -> None:
        # Publishing only queues the message, so this does not wait for the network; the shield
        # lets it happen although the request is being cancelled.
        with trio.move_on_after(CANCEL_PATIENCE_S, shield=True):
            try:
                await self._plane.tell(self._address, encode_cancel(self._envelope.id, reason))
            except (OverloadedError, ConnectError) as error:
                text = "request %s: cannot tell the worker to cancel: %s"
                _log.warning(text, self._envelope.id, error)
