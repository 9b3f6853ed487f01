"""The control frames of a call-home connection: JSON headers to events, and back.

`response_stream.py` and `request_stream.py` say who may send which of them when.
"""

from __future__ import annotations

from typing import Any, Final

import attrs
import msgspec

from ...errors import RemoteProtocolError, TrinamoError
from ..undecodable import UNDECODABLE
from .codec import Frame, encode_frame
from .reasons import Reason, known_reason
from .request import MESSAGE_CHARS_MAX, StreamType, WireError, rebuilt, wire_error

SUBJECT_CHARS_MAX: Final = 128
"""A longer one is none of ours."""


@attrs.frozen
class Handshake:
    """The worker's greeting: which subject it answers, and which way the items flow."""

    subject: str
    stream_type: StreamType
    proof: str = attrs.field(default="", repr=False)
    """That it knows the cluster's secret: `membership.call_home_proof`."""


@attrs.frozen
class Opened:
    """Prologue: the handler has started."""


@attrs.frozen
class Declined:
    """Prologue: there will be no item, and why."""

    error: TrinamoError


@attrs.frozen
class Data:
    """One item."""

    payload: bytes


@attrs.frozen
class Sentinel:
    """The only proof that what was sent is complete."""


@attrs.frozen
class Failed:
    """The handler failed after the prologue; terminal."""

    error: TrinamoError


@attrs.frozen
class Stop:
    """Please finish early."""

    reason: Reason = Reason.STOP_REQUESTED


@attrs.frozen
class Kill:
    """No more is wanted."""

    reason: Reason = Reason.CONSUMER_DROPPED


@attrs.frozen
class Refused:
    """The caller does not know the subject, or it is taken, or the handshake was bad."""

    code: str
    message: str
    reason: Reason = Reason.CONSUMER_DROPPED
    """Why nobody waits for the call."""


@attrs.frozen
class Closed:
    """The connection ended, by FIN or RST; no frame, but a step all the same."""


Control = Handshake | Opened | Declined | Data | Sentinel | Failed | Stop | Kill | Refused | Closed


class WireRefusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """A refusal as it travels."""

    code: str
    message: str = ""
    reason: str = ""

    @classmethod
    def of(cls, event: Refused) -> WireRefusal:
        word = "" if event.reason is Reason.CONSUMER_DROPPED else event.reason.value
        return cls(event.code, event.message[:MESSAGE_CHARS_MAX], word)

    @property
    def event(self) -> Refused:
        is_bad = self.code == "bad_handshake"
        default = Reason.PROTOCOL_ERROR if is_bad else Reason.CONSUMER_DROPPED
        return Refused(self.code, self.message, known_reason(self.reason, default))


class _WireHandshake(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    subject: str
    stream_type: StreamType
    proof: str = ""


class _WirePrologue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    error: WireError | None


class _WireFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    failed: WireError


class _WireStop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stop: str


class _WireKill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kill: str


class _WireRefused(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    refused: WireRefusal


_WORDS: Final[dict[type, str]] = {Sentinel: "Sentinel", Stop: "Stop", Kill: "Kill"}
_EVENTS: Final[dict[str, Control]] = {"Sentinel": Sentinel(), "Stop": Stop(), "Kill": Kill()}
_WIRE: Final[dict[str, type[msgspec.Struct]]] = {
    "subject": _WireHandshake,
    "error": _WirePrologue,
    "failed": _WireFailed,
    "refused": _WireRefused,
    "stop": _WireStop,
    "kill": _WireKill,
}
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


def encode_control(event: Control) -> bytes:
    """The frame that says `event`; `Data` becomes a data-only frame, `Closed` has none."""
    if isinstance(event, Data):
        assert event.payload, "an empty item would be an empty frame, which means nothing"
        return encode_frame(b"", event.payload)
    assert not isinstance(event, Closed), "the end of a connection is not a frame"
    return encode_frame(_encode(_to_wire(event)))


def _to_wire(event: Control) -> Any:
    match event:
        case Handshake(subject, stream_type, proof):
            return _WireHandshake(subject, stream_type, proof)
        case Opened():
            return {"error": None}
        case Declined(error):
            return {"error": wire_error(error)}
        case Failed(error):
            return {"failed": wire_error(error)}
        case Refused():
            return _WireRefused(WireRefusal.of(event))
        case Stop(reason) if reason is not Reason.STOP_REQUESTED:
            return {"stop": reason}
        case Kill(reason) if reason is not Reason.CONSUMER_DROPPED:
            return {"kill": reason}
        case _:
            return _WORDS[type(event)]


def parse_frame(frame: Frame) -> Control | None:
    """The event a frame of a call-home connection stands for; None for an empty frame.

    Raises `RemoteProtocolError` for JSON that is no control message, and for a control message
    that carries data.
    """
    header, data = frame
    if not header:
        return Data(data) if data else None
    if data:
        raise RemoteProtocolError(f"a control frame carries {len(data)} bytes of data")
    try:
        return _from_wire(_decode(header))
    except UNDECODABLE as error:
        raise RemoteProtocolError(f"malformed control frame: {error}") from error


def _from_wire(value: Any) -> Control:
    if isinstance(value, str) and value in _EVENTS:
        return _EVENTS[value]
    kind = next((_WIRE[key] for key in value if key in _WIRE), None) if _is_object(value) else None
    if kind is None:
        raise RemoteProtocolError(f"unknown control frame {str(value)[:80]!r}")
    match msgspec.convert(value, kind):
        case _WireHandshake(subject, stream_type, proof):
            if not 0 < len(subject) <= SUBJECT_CHARS_MAX:
                raise RemoteProtocolError(f"a subject of {len(subject)} characters")
            return Handshake(subject, stream_type, proof)
        case _WirePrologue(None):
            return Opened()
        case _WirePrologue(WireError() as error):
            return Declined(rebuilt(error))
        case _WireFailed(error):
            return Failed(rebuilt(error))
        case _WireRefused(refusal):
            return refusal.event
        case other:
            return _early_end(other)


def _early_end(wire: msgspec.Struct) -> Stop | Kill:
    match wire:
        case _WireStop(word):
            return Stop(known_reason(word, Reason.STOP_REQUESTED))
        case _WireKill(word):
            return Kill(known_reason(word, Reason.CONSUMER_DROPPED))
        case other:
            raise AssertionError(other)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)
