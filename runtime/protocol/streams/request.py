"""The request envelope and its typed answer: what travels on every request plane.

Nothing here touches a wire: `encode_*` and `decode_*` turn structs into the header part of a
two-part frame and back. An answer that is none of `AckStatus` is a `RemoteProtocolError`, never a
success.
"""

from __future__ import annotations

import enum
import random
from typing import Annotated, Final

import msgspec

from ...errors import (
    EngineError,
    OverloadedError,
    RemoteProtocolError,
    RequestError,
    TrinamoError,
    UnavailableError,
    UnknownModelError,
    error_from_wire,
    error_to_wire,
)
from ..traceparent import TRACEPARENT_CHARS_MAX
from ..undecodable import UNDECODABLE, decoded

REQUEST_ID_CHARS_MAX = 128
_ATTEMPT_CHARS = 9
CONTEXT_ID_CHARS_MAX = REQUEST_ID_CHARS_MAX - _ATTEMPT_CHARS
"""What a request may be called where it enters, so that each of its attempts has room for its own."""
_READABLE_ID_CHARS_MAX = 1024
"""Whoever sent a longer one may be told so, but not in an answer that is as long."""
MESSAGE_CHARS_MAX = 4096
"""Longer error texts are cut: a header over its bound would cost the receiver the connection."""
PARAM_CHARS_MAX = 256
"""Likewise the name of what is wrong in a request."""


class Reason(enum.StrEnum):
    """Why a request was stopped or killed; the label of the cancellation metric.

    Its word on the wire: one that is unknown here, or none, is the reason that the frame has by default.
    """

    CLIENT_DISCONNECT = "client_disconnect"
    DEADLINE = "deadline"
    STOP_REQUESTED = "stop_requested"
    CONSUMER_DROPPED = "consumer_dropped"
    FRONTEND_SHUTDOWN = "frontend_shutdown"
    WORKER_SHUTDOWN = "worker_shutdown"
    PROTOCOL_ERROR = "protocol_error"


def known_reason(word: str, default: Reason) -> Reason:
    """The reason that a peer's `word` stands for; `default` for one that is unknown here."""
    try:
        return Reason(word)
    except ValueError:
        return default


class StreamType(enum.StrEnum):
    """Which way the items of a stream flow."""

    REQUEST = "Request"
    RESPONSE = "Response"


class RequestKind(enum.StrEnum):
    """How the answer comes back."""

    STREAM = "stream"
    """Over a response stream, on the link of the request; else the worker calls home."""
    UNARY = "unary"
    """As one value on the request plane itself."""
    PROBE = "probe"
    """The ACK or NACK is the answer: who is here, and whether it serves this. Nothing runs."""


class Carrier(enum.StrEnum):
    """Whose the link is that a stream travels on."""

    DEDICATED = "dedicated"
    """It is the stream's own: the worker dials it, and closes it after the one stream."""
    MULTIPLEXED = "multiplexed"
    """All streams between two processes share it: that of the request, if it came by one."""


class ConnectionInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which stream the worker is to open: its subject, and where to call home if it must."""

    address: str
    subject: str
    stream_type: StreamType
    carrier: Carrier = Carrier.DEDICATED
    """What the caller takes it on."""
    window_bytes: int = 0
    """How much of an answer may be on its way before the caller has taken it."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request on its way to one instance. The payload travels beside it as bytes."""

    id: str
    endpoint: str
    """`namespace/component/endpoint`."""
    instance_id: str = ""
    kind: RequestKind = RequestKind.STREAM
    response: ConnectionInfo | None = None
    request: ConnectionInfo | None = None
    """Set when the caller also streams input to the worker."""
    deadline_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """How long the caller will still wait, from the moment this was sent; 0: no bound."""
    traceparent: Annotated[str, msgspec.Meta(max_length=TRACEPARENT_CHARS_MAX)] = ""
    """The caller's span (`protocol/traceparent.py`); empty unless it traces."""


class AckStatus(enum.StrEnum):
    """The worker's decision about an envelope."""

    ACCEPTED = "accepted"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    UNKNOWN_ENDPOINT = "unknown_endpoint"
    UNKNOWN_MODEL = "unknown_model"
    """The endpoint is here, and serves another model than the request names."""
    INVALID = "invalid"
    FAILED = "failed"
    """What looks at a request there, such as an engine's statistics, raised: it did not run."""


class WireError(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as it travels; `rebuilt` makes one of it again."""

    code: str
    message: str = ""
    definite: bool = False
    retry_after_s: Annotated[int, msgspec.Meta(ge=0, le=86_400)] = 0
    param: Annotated[str, msgspec.Meta(max_length=PARAM_CHARS_MAX)] = ""
    """Of a request that is refused: what is wrong in it."""


def rebuilt(error: WireError) -> TrinamoError:
    return error_from_wire(
        error.code,
        error.message,
        definite=error.definite,
        retry_after_s=error.retry_after_s,
        param=error.param,
    )


class RequestAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What comes back on the request plane: exactly one of `status` and `error` is set.

    `status` is the worker's decision about the envelope with this `id`: the ACK is `accepted`,
    anything else a NACK. To a unary request `accepted` means that the result is the data part of the
    frame, and `error` is what the handler raised.
    """

    id: str
    status: AckStatus | None = None
    message: str = ""
    instance_id: str = ""
    """Who answers; only a probe asks for it."""
    error: WireError | None = None

    @property
    def ack(self) -> RequestAnswer:
        """Itself, where an ACK or NACK is due; raises `RemoteProtocolError` if it is an error."""
        if self.status is None:
            raise RemoteProtocolError(f"request {self.id}: an error where an ACK was due")
        return self


class Cancel(msgspec.Struct, frozen=True):
    """A caller wants no answer to a request any more."""

    request_id: str
    reason: Reason = Reason.CONSUMER_DROPPED


class _WireCancel(msgspec.Struct, frozen=True, omit_defaults=True):
    cancel: str
    reason: str = ""


class _Identified(msgspec.Struct, frozen=True):
    id: str


encode_envelope: Final = msgspec.json.Encoder().encode
"""Makes the header part that carries an envelope."""
encode_answer: Final = encode_envelope
"""That of an ACK, a NACK or the header of a unary answer."""
_envelope_decoder = msgspec.json.Decoder(Envelope)
_answer_decoder = msgspec.json.Decoder(RequestAnswer)
_cancel_decoder = msgspec.json.Decoder(_WireCancel)
_id_decoder = msgspec.json.Decoder(_Identified)
_CANCEL_PREFIX = b'{"cancel":'


def attempt_id(context_id: str, rng: random.Random) -> str:
    """The id of one attempt of a request; of a longer name than the wire takes the end is kept.

    The end, because what makes a name unlike others is appended to it.
    """
    return f"{context_id[-CONTEXT_ID_CHARS_MAX:]}.{rng.getrandbits(32):08x}"


def decode_envelope(header: bytes) -> Envelope:
    """The envelope in a header part; raises `RemoteProtocolError` on anything else."""
    envelope = decoded(_envelope_decoder.decode, header, "malformed request envelope")
    if not 0 < len(envelope.id) <= REQUEST_ID_CHARS_MAX:
        raise RemoteProtocolError(
            f"request id of {len(envelope.id)} characters; 1 to {REQUEST_ID_CHARS_MAX} allowed"
        )
    if envelope.kind is RequestKind.STREAM and envelope.response is None:
        raise RemoteProtocolError("a streaming request without a response connection")
    return envelope


def readable_id(header: bytes) -> str:
    """The request id in a header that is otherwise no envelope or answer; empty if there is none.

    So that what is wrong with one request is said about that request alone.
    """
    try:
        found = _id_decoder.decode(header).id
    except UNDECODABLE:
        return ""
    return found if len(found) <= _READABLE_ID_CHARS_MAX else ""


def decode_answer(header: bytes) -> RequestAnswer:
    """The answer in a header part; an unknown status raises `RemoteProtocolError`."""
    answer = decoded(_answer_decoder.decode, header, "malformed request-plane answer")
    if (answer.status is None) is (answer.error is None):
        raise RemoteProtocolError("an answer must have either a status or an error")
    return answer


def failure(request_id: str, error: TrinamoError) -> RequestAnswer:
    return RequestAnswer(id=request_id, error=wire_error(error))


def wire_error(error: TrinamoError) -> WireError:
    """`error` as it travels, its text cut to `MESSAGE_CHARS_MAX`, and the name of what is wrong."""
    fields = error_to_wire(error)
    param = fields.get("param", "")[:PARAM_CHARS_MAX]
    return WireError(**fields | {"message": fields["message"][:MESSAGE_CHARS_MAX], "param": param})


def encode_cancel(request_id: str, reason: Reason = Reason.CONSUMER_DROPPED) -> bytes:
    """The header part that says: no answer to this request is wanted any more, and why."""
    word = "" if reason is Reason.CONSUMER_DROPPED else reason.value
    return encode_envelope(_WireCancel(request_id, word))


def decode_cancel(header: bytes) -> Cancel | None:
    """The cancel in this header part, None if it is something else."""
    if not header.startswith(_CANCEL_PREFIX):
        return None
    wire = decoded(_cancel_decoder.decode, header, "malformed cancel")
    reason = known_reason(wire.reason, Reason.CONSUMER_DROPPED)
    return Cancel(wire.cancel[:REQUEST_ID_CHARS_MAX], reason)


def raise_for_nack(answer: RequestAnswer) -> None:
    """Raise the error that an answer tells or a NACK stands for; return if it is `accepted`."""
    message = answer.message
    match answer.status:
        case None:
            assert answer.error is not None, "checked when the answer was decoded"
            raise rebuilt(answer.error)
        case AckStatus.ACCEPTED:
            return
        case AckStatus.OVERLOADED:
            raise OverloadedError(message or "the worker is full", bound="requests_max")
        case AckStatus.DRAINING:
            raise UnavailableError(message or "the worker is draining")
        case AckStatus.UNKNOWN_ENDPOINT:
            raise UnavailableError(message or "the worker has no such endpoint")
        case AckStatus.UNKNOWN_MODEL:
            raise UnknownModelError(message or "the worker serves another model")
        case AckStatus.INVALID:
            raise RequestError(message or "the worker calls the request invalid")
        case AckStatus.FAILED:
            raise EngineError(message or "the worker could not look at the request", definite=True)
