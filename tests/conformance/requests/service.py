"""A worker's service that does what it is told, and envelopes for it: for request planes."""

from __future__ import annotations

import trio

from trinamo.runtime.caller.unary import UnaryAttempt
from trinamo.runtime.context import Context
from trinamo.runtime.errors import EngineError, KilledError, UnavailableError
from trinamo.runtime.planes import CallHome, RequestPlane
from trinamo.runtime.protocol.streams.request import (
    AckStatus,
    ConnectionInfo,
    Envelope,
    Reason,
    RequestAnswer,
    RequestKind,
    StreamType,
    raise_for_nack,
)

HOME = ConnectionInfo("127.0.0.1:1", "subject", StreamType.RESPONSE)


class Service:
    """A worker's service that does what the endpoint's name says."""

    def __init__(self) -> None:
        self.admitted: list[tuple[Envelope, bytes]] = []
        self.answered: list[str] = []
        self.cancelled: list[str] = []
        self.reasons: list[Reason] = []
        """Of each of them."""
        self.remembered: list[str] = []
        self.running = 0
        self.release = trio.Event()
        self.scopes: dict[str, trio.CancelScope] = {}

    def admit(
        self,
        envelope: Envelope,
        payload: bytes,
        answering: CallHome | None = None,
        *,
        by_worker: bool = True,
    ) -> RequestAnswer:
        self.admitted.append((envelope, payload))
        name = envelope.endpoint.rpartition("/")[2]
        if name in set(AckStatus):
            whom = envelope.instance_id
            text = f"it is {name}"
            return RequestAnswer(
                id=envelope.id, status=AckStatus(name), message=text, instance_id=whom
            )
        return RequestAnswer(id=envelope.id, status=AckStatus.ACCEPTED)

    async def answer(self, envelope: Envelope, payload: bytes, *, by_worker: bool = True) -> bytes:
        self.running += 1
        try:
            with self.scopes.setdefault(envelope.id, trio.CancelScope()):
                return await self.work(envelope, payload)
            raise KilledError("cancelled")
        finally:
            self.running -= 1

    async def work(self, envelope: Envelope, payload: bytes) -> bytes:
        match envelope.endpoint.rpartition("/")[2]:
            case "fail":
                raise EngineError("out of luck", definite=False)
            case "drain":
                raise UnavailableError("draining")
            case "wait":
                await self.release.wait()
            case "big":
                return b"x" * int(payload)
            case _:
                pass
        self.answered.append(envelope.id)
        return b"re:" + payload

    def cancel(
        self,
        request_id: str,
        reason: Reason = Reason.CONSUMER_DROPPED,
        *,
        has_arrived: bool = False,
    ) -> None:
        self.cancelled.append(request_id)
        self.reasons.append(reason)
        if request_id in self.scopes:
            self.scopes[request_id].cancel()
        if not has_arrived:
            self.remembered.append(request_id)


def stream(request_id: str, endpoint: str = "accepted") -> Envelope:
    return Envelope(id=request_id, endpoint=f"ns/c/{endpoint}", response=HOME)


def probe(request_id: str, endpoint: str = "accepted") -> Envelope:
    name = f"ns/c/{endpoint}"
    return Envelope(id=request_id, endpoint=name, instance_id="a1", kind=RequestKind.PROBE)


def unary(request_id: str, endpoint: str = "echo") -> Envelope:
    return Envelope(id=request_id, endpoint=f"ns/c/{endpoint}", kind=RequestKind.UNARY)


async def ack_of(
    plane: RequestPlane, address: str, envelope: Envelope, payload: bytes
) -> RequestAnswer:
    """The ACK or NACK of a request that calls home, or of a probe."""
    attempt = UnaryAttempt(Context(envelope.id))
    answer, _ = await attempt.run(plane, address, envelope, payload)
    return answer.ack


async def result_of(
    plane: RequestPlane,
    address: str,
    envelope: Envelope,
    payload: bytes,
    context: Context | None = None,
) -> bytes:
    """The result of a unary request; raises what the worker raised, or what a NACK stands for."""
    attempt = UnaryAttempt(context or Context(envelope.id))
    answer, result = await attempt.run(plane, address, envelope, payload)
    raise_for_nack(answer)
    return result
