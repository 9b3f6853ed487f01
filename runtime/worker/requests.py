"""What arrives on a request plane, decided: one table for the servers of all of them.

A server brings frames and sends answers (`transports/tcp/requests/server.py`,
`transports/nats/requests.py`); the service that decides about a request is the worker
(`worker.py`). In between, here, are the unary requests that run now, so that a cancel finds them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from ..errors import RemoteProtocolError, TrinamoError
from ..planes import CallHome, RequestService
from ..protocol.streams.request import (
    AckStatus,
    Carrier,
    Envelope,
    RequestAnswer,
    RequestKind,
    decode_cancel,
    decode_envelope,
    failure,
)

_SEEN_MAX: Final = 4096
Reply = Callable[[RequestAnswer, bytes], Awaitable[None]]


class RequestTable:
    """The requests of one connection, or of one subject.

    At most `unary_max` unary requests run at once, and the next gets the NACK `overloaded`; for
    streaming requests the service itself decides.

    Where the way here `keeps_order`, a request has arrived before its cancel, or never will. Elsewhere
    a cancel may overtake its request, and the last few thousand requests are remembered, so that the
    service need not remember the cancel of one that has been here.

    Where a request comes by a link, `answering` opens the streams for it on the same one. The service
    is told whether they are asked `by_worker`.
    """

    def __init__(
        self,
        service: RequestService,
        nursery: trio.Nursery,
        *,
        unary_max: int,
        keeps_order: bool,
        reserve: Callable[[int], bool] = lambda _: True,
        give_back: Callable[[int], None] = lambda _: None,
        answering: CallHome | None = None,
        by_worker: bool = True,
    ) -> None:
        self._service = service
        self._nursery = nursery
        self._unary_max = unary_max
        self._keeps_order = keeps_order
        self._seen_max = 0 if keeps_order else _SEEN_MAX
        self._reserve = reserve
        self._give_back = give_back
        self._answering = answering
        self._by_worker = by_worker
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._unary: dict[str, bool] = {}
        """Those that run now, and whether their answers are wanted."""

    @property
    def unary_count(self) -> int:
        """Unary requests that run now."""
        return len(self._unary)

    def take(self, header: bytes, payload: bytes, reply: Reply | None) -> RequestAnswer | None:
        """The answer to one frame; None if there is none, or if `reply` will bring it.

        `reply` is None where the sender has not said where to. Raises `RemoteProtocolError` for a
        frame that is no request, or one that cannot be.
        """
        cancel = decode_cancel(header)
        if cancel is not None:
            cancelled = cancel.request_id
            has_arrived = self._keeps_order or cancelled in self._seen
            self._service.cancel(cancelled, cancel.reason, has_arrived=has_arrived)
            if cancelled in self._unary:
                self._unary[cancelled] = False
            return None
        envelope = decode_envelope(header)
        self._seen[envelope.id] = None
        if len(self._seen) > self._seen_max:
            self._seen.popitem(last=False)
        if reply is None:
            raise RemoteProtocolError(f"request {envelope.id} says nowhere to answer")
        if envelope.kind is not RequestKind.UNARY:
            return self._admit(envelope, payload)
        if envelope.id in self._unary:
            raise RemoteProtocolError(f"request id {envelope.id} is in use")
        if len(self._unary) >= self._unary_max or not self._reserve(len(payload)):
            full = f"no room beside the {len(self._unary)} requests in flight"
            return RequestAnswer(id=envelope.id, status=AckStatus.OVERLOADED, message=full)
        self._unary[envelope.id] = True
        self._nursery.start_soon(self._answer, envelope, payload, reply)
        return None

    def _admit(self, envelope: Envelope, payload: bytes) -> RequestAnswer | None:
        response, answering = envelope.response, self._answering
        if response is None or response.carrier is not Carrier.MULTIPLEXED:
            answering = None
        answer = self._service.admit(envelope, payload, answering, by_worker=self._by_worker)
        if answering is not None and answer.status is AckStatus.ACCEPTED:
            # The stream that is opened on the link says so.
            return None
        return answer

    def cancel_all(self) -> None:
        """Whoever asked has gone: tell the service, while there is somebody to cancel."""
        for request_id in tuple(self._unary):
            self._service.cancel(request_id, has_arrived=True)

    async def _answer(self, envelope: Envelope, payload: bytes, reply: Reply) -> None:
        result = b""
        try:
            try:
                result = await self._service.answer(envelope, payload, by_worker=self._by_worker)
                answer = RequestAnswer(id=envelope.id, status=AckStatus.ACCEPTED)
            except TrinamoError as error:
                answer = failure(envelope.id, error)
            if self._unary[envelope.id]:
                await reply(answer, result)
        finally:
            del self._unary[envelope.id]
            self._give_back(len(payload))
