"""What the two ends of a stream say to each other, as events.

`response_stream.py` and `request_stream.py` say who may send which of them when, `link_frames.py` how
they travel.
"""

from __future__ import annotations

from typing import Final

import attrs
import msgspec

from ...errors import TrinamoError
from .request import MESSAGE_CHARS_MAX, Reason, StreamType, known_reason

SUBJECT_CHARS_MAX: Final = 128
"""A longer one is none of ours."""


@attrs.frozen
class Handshake:
    """The worker's greeting: which subject it answers, and which way the items flow."""

    subject: str
    stream_type: StreamType


@attrs.frozen
class Opened:
    """Prologue: the answer begins; its first item follows, or the handler takes input first."""


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
    """The stream ended without an end mark: said so, or lost with its link."""

    why: str = ""
    """How it was lost; empty where the other end said so."""


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
