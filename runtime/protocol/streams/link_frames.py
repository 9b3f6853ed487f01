"""The frames of a link, the connection of two processes, to bytes and back.

Two-part frames whose header is `stream u32 | kind u8 | …`, big-endian:

| kind | rest of the header | data |
|---|---|---|
| open | `window u32`, `type u8` | the subject |
| prologue | | nothing, or the error as JSON |
| data | | an item, or the last part of one |
| part | | another part of an item |
| batch | pairs of `stream u32`, `length u32`; its own stream is 0 | the items, end to end |
| sentinel, closed | | |
| stop, kill | | nothing, or the reason |
| failed, refused | | the error as JSON |
| credit | `bytes u32` | |
| request | an envelope, or a cancel, as JSON | the payload, or the last part of one |
| answer | an ACK, a NACK or the header of a unary answer, as JSON | the result, or its last part |

`closed` is the FIN of one stream: its end without an end mark. A request or an answer is a message of no
stream, so its number is 0; a long one has a number of its own, from `MESSAGES_FROM` on, which its parts
bear, and `closed` if its rest is not sent. `refused` of stream 0 is the last word to a peer whose frames are
none, for the link is closed then. Kinds from 128 on are those that newer minors add, on any stream: they are
skipped. `multiplex.py` packs and unpacks what many streams say at once. Peer bytes raise nothing but `RemoteProtocolError`.
"""

from __future__ import annotations

import enum
import struct
from typing import Final

import attrs
import msgspec

from ...errors import RemoteProtocolError
from ..undecodable import UNDECODABLE, decoding_fault
from .control import (
    SUBJECT_CHARS_MAX,
    Closed,
    Control,
    Declined,
    Failed,
    Handshake,
    Kill,
    Opened,
    Refused,
    Sentinel,
    Stop,
    WireRefusal,
)
from .request import StreamType, WireError, known_reason, rebuilt, wire_error


class Kind(enum.IntEnum):
    """What a frame is: the fifth byte of its header."""

    OPEN = 1
    PROLOGUE = 2
    DATA = 3
    PART = 4
    BATCH = 5
    SENTINEL = 6
    FAILED = 7
    STOP = 8
    KILL = 9
    REFUSED = 10
    CLOSED = 11
    CREDIT = 12
    REQUEST = 13
    ANSWER = 14


ADDED_FROM: Final = 128
"""Kinds from here on are those that minor versions add: who does not know one skips it."""

_FRAME: Final = struct.Struct(">IIIB")
_OPENING: Final = struct.Struct(">IIIBIB")
_CREDIT: Final = struct.Struct(">IIIBI")
HEAD_BYTES: Final = 5
"""Of the header of every frame: stream and kind."""
MESSAGES_FROM: Final = 1 << 31
"""The number of the first message that is sent in parts; streams have those below."""
_TYPES: Final = (StreamType.RESPONSE, StreamType.REQUEST)
_BARE: Final[dict[int, Control]] = {
    Kind.SENTINEL: Sentinel(), Kind.STOP: Stop(), Kind.KILL: Kill(), Kind.CLOSED: Closed(),
}  # fmt: skip
_BARE_KINDS: Final = {event: kind for kind, event in _BARE.items()}


@attrs.frozen
class Opening:
    """A worker opens a stream: its handshake, and how much the caller may send on it unasked."""

    handshake: Handshake
    window_bytes: int


@attrs.define
class LinkMessage:
    """A request or an answer, which are of no stream. Not frozen: one is made for every request."""

    kind: Kind
    header: bytes
    payload: bytes


@attrs.frozen
class Credit:
    """The reader of a stream has taken so many bytes of it."""

    given_bytes: int


_encode = msgspec.json.Encoder().encode
_decode_error = msgspec.json.Decoder(WireError).decode
_decode_refusal = msgspec.json.Decoder(WireRefusal).decode


def encode_opening(stream: int, opening: Opening) -> bytes:
    subject = opening.handshake.subject.encode()
    stream_type = _TYPES.index(opening.handshake.stream_type)
    head = (HEAD_BYTES + 5, len(subject), stream, Kind.OPEN, opening.window_bytes, stream_type)
    return _OPENING.pack(*head) + subject


def encode_credit(stream: int, given_bytes: int) -> bytes:
    return _CREDIT.pack(HEAD_BYTES + 4, 0, stream, Kind.CREDIT, given_bytes)


def encode_event(stream: int, event: Control) -> bytes:
    """The frame that says `event` on `stream`; handshakes and items have functions of their own."""
    kind = _BARE_KINDS.get(event)
    if kind is not None:
        return _frame(stream, kind)
    match event:
        case Stop(reason):
            return _frame(stream, Kind.STOP, reason.encode())
        case Kill(reason):
            return _frame(stream, Kind.KILL, reason.encode())
        case Opened():
            return _frame(stream, Kind.PROLOGUE)
        case Declined(error):
            return _frame(stream, Kind.PROLOGUE, _encode(wire_error(error)))
        case Failed(error):
            return _frame(stream, Kind.FAILED, _encode(wire_error(error)))
        case Refused():
            return _frame(stream, Kind.REFUSED, _encode(WireRefusal.of(event)))
        case _:
            raise AssertionError(event)


def _frame(stream: int, kind: int, data: bytes = b"") -> bytes:
    return _FRAME.pack(HEAD_BYTES, len(data), stream, kind) + data


def encode_item(stream: int, item: bytes, *, is_last: bool = True) -> bytes:
    """The frame of an item, or of a part of one that is not the last."""
    return _frame(stream, Kind.DATA if is_last else Kind.PART, item)


def encode_message(kind: Kind, header: bytes, payload: bytes, number: int = 0) -> bytes:
    """The frame of a message; `payload` is the last part of it where it has a number."""
    head = _FRAME.pack(HEAD_BYTES + len(header), len(payload), number, kind)
    return b"".join((head, header, payload))


def encode_batch(pairs: list[int], items: list[bytes]) -> bytes:
    """The frame of many items; `pairs` are each one's stream and length, end to end."""
    if len(items) == 1:
        return encode_item(pairs[0], items[0])
    data = b"".join(items)
    head = _FRAME.pack(HEAD_BYTES + 4 * len(pairs), len(data), 0, Kind.BATCH)
    return b"".join((head, struct.pack(f">{len(pairs)}I", *pairs), data))


def parse_opening(header: bytes, data: bytes) -> Opening:
    """What opens a stream; `RemoteProtocolError` if it is malformed."""
    try:
        window_bytes, stream_type = struct.unpack(">IB", header[HEAD_BYTES:])
        handshake = Handshake(data.decode("ascii"), _TYPES[stream_type])
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"malformed opening: {error}") from error
    if not 0 < len(data) <= SUBJECT_CHARS_MAX:
        raise RemoteProtocolError(f"a subject of {len(data)} characters")
    return Opening(handshake, window_bytes)


def parse_event(kind: int, header: bytes, data: bytes) -> Control | Credit:
    """Any frame but an opening and those of items; `RemoteProtocolError` if it is malformed."""
    if kind == Kind.CREDIT:
        if len(header) != HEAD_BYTES + 4 or data:
            raise RemoteProtocolError("malformed credit")
        return Credit(int.from_bytes(header[HEAD_BYTES:], "big"))
    if len(header) != HEAD_BYTES:
        raise RemoteProtocolError(f"a header of {len(header)} bytes for kind {kind}")
    bare = _BARE.get(kind)
    if bare is not None:
        return _with_reason(bare, data) if data else bare
    try:
        if kind == Kind.PROLOGUE:
            return Declined(rebuilt(_decode_error(data))) if data else Opened()
        if kind == Kind.FAILED:
            return Failed(rebuilt(_decode_error(data)))
        if kind == Kind.REFUSED:
            return _decode_refusal(data).event
    except UNDECODABLE as error:
        raise RemoteProtocolError(
            f"malformed frame of kind {kind}: {decoding_fault(error)}"
        ) from error
    raise RemoteProtocolError(f"unknown kind {kind}")


def _with_reason(bare: Control, data: bytes) -> Stop | Kill:
    word = data.decode("ascii", "replace")
    match bare:
        case Stop(default):
            return Stop(known_reason(word, default))
        case Kill(default):
            return Kill(known_reason(word, default))
        case _:
            raise RemoteProtocolError(f"{type(bare).__name__} with {len(data)} bytes of data")
