from __future__ import annotations

import json

import pytest

from trinamo.runtime.errors import (
    ContextLengthError,
    DisconnectedError,
    EngineError,
    KilledError,
    LocalProtocolError,
    OverloadedError,
    RemoteProtocolError,
    RequestError,
    TrinamoError,
    UnavailableError,
)
from trinamo.runtime.protocol.streams.codec import HEADER_BYTES_MAX, decode_frame
from trinamo.runtime.protocol.streams.control import (
    Closed,
    Control,
    Data,
    Declined,
    Failed,
    Handshake,
    Kill,
    Opened,
    Refused,
    Sentinel,
    Stop,
)
from trinamo.runtime.protocol.streams.link_frames import (
    Credit,
    Kind,
    Opening,
    encode_event,
    encode_opening,
    parse_event,
    parse_opening,
)
from trinamo.runtime.protocol.streams.request import Reason, StreamType


def parse(frame: bytes) -> Control | Credit:
    header, data = decode_frame(frame)
    return parse_event(header[4], header, data)


def header_of(kind: int) -> bytes:
    return b"\0\0\0\7" + bytes([kind])


@pytest.mark.parametrize(
    ("event", "kind", "said"),
    [
        (Opened(), Kind.PROLOGUE, b""),
        (Sentinel(), Kind.SENTINEL, b""),
        (Stop(), Kind.STOP, b""),
        (Kill(), Kind.KILL, b""),
        (Closed(), Kind.CLOSED, b""),
        (
            Refused("taken_subject", "no"),
            Kind.REFUSED,
            b'{"code":"taken_subject","message":"no"}',
        ),
    ],
)
def test_an_event_is_the_frame_of_the_specification_and_comes_back(
    event: Control, kind: Kind, said: bytes
) -> None:
    frame = encode_event(7, event)
    assert decode_frame(frame) == (header_of(kind), said)
    assert parse(frame) == event


@pytest.mark.parametrize("stream_type", StreamType)
def test_an_opening_is_window_type_and_subject(stream_type: StreamType) -> None:
    opening = Opening(Handshake("ab12", stream_type), 65536)
    header, data = decode_frame(encode_opening(7, opening))
    is_request = stream_type is StreamType.REQUEST
    assert header == header_of(Kind.OPEN) + (65536).to_bytes(4, "big") + bytes([is_request])
    assert data == b"ab12"
    assert parse_opening(header, data) == opening


@pytest.mark.parametrize("reason", Reason)
def test_a_stop_and_a_kill_say_why_unless_it_is_the_usual_reason(reason: Reason) -> None:
    frames = [encode_event(7, event) for event in (Stop(reason), Kill(reason))]
    assert list(map(parse, frames)) == [Stop(reason), Kill(reason)]
    is_usual = [reason is Reason.STOP_REQUESTED, reason is Reason.CONSUMER_DROPPED]
    assert [not decode_frame(frame)[1] for frame in frames] == is_usual


def test_a_reason_of_another_version_is_the_usual_one() -> None:
    for word in (b"boredom", b"bore\xffdom"):
        events = [parse_event(kind, bytes(5), word) for kind in (Kind.STOP, Kind.KILL)]
        assert events == [Stop(), Kill()]


@pytest.mark.parametrize(
    "error",
    [
        EngineError("broken", definite=True),
        EngineError("broken"),
        RequestError("too long"),
        RequestError("too long", param="prompt"),
        ContextLengthError.of(10, "11 tokens", "messages"),
        OverloadedError("full"),
        UnavailableError("draining"),
        DisconnectedError("the worker shut down"),
    ],
)
def test_a_typed_error_comes_back_as_itself_in_prologue_and_end(error: TrinamoError) -> None:
    for event in (Declined(error), Failed(error)):
        back = parse(encode_event(7, event))
        assert type(back) is type(event)
        assert isinstance(back, (Declined, Failed))
        assert type(back.error) is type(error)
        assert (back.error.message, back.error.definite) == (error.message, error.definite)
        assert getattr(back.error, "param", None) == getattr(error, "param", None)


@pytest.mark.parametrize("error", [KilledError("k"), LocalProtocolError("bug")])
def test_an_error_that_only_makes_sense_at_home_arrives_as_an_engine_error(
    error: TrinamoError,
) -> None:
    back = parse(encode_event(7, Failed(error)))
    assert isinstance(back, Failed)
    assert type(back.error) is EngineError


def test_an_error_text_longer_than_a_header_is_cut_not_lost() -> None:
    """Sent whole it would be an oversize frame, and the caller would never learn what failed."""
    back = parse(encode_event(7, Failed(EngineError("é" * HEADER_BYTES_MAX))))
    assert isinstance(back, Failed)
    assert set(back.error.message) == {"é"}


@pytest.mark.parametrize("event", [Data(b"x"), Handshake("s", StreamType.RESPONSE)])
def test_what_has_a_frame_of_its_own_is_no_event(event: Control) -> None:
    with pytest.raises(AssertionError):
        encode_event(7, event)


@pytest.mark.parametrize("kind", [Kind.SENTINEL, Kind.CLOSED])
def test_an_end_mark_with_data_is_malformed(kind: Kind) -> None:
    with pytest.raises(RemoteProtocolError, match="with 1 bytes of data"):
        parse_event(kind, header_of(kind), b"x")


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (Kind.FAILED, b""),
        (Kind.FAILED, b"x"),
        (Kind.FAILED, b"\xff\xfe"),
        (Kind.FAILED, b'"\\ud800"'),
        (Kind.FAILED, b"null"),
        (Kind.FAILED, b"9" * 5000),
        (Kind.FAILED, b"[" * 100_000),
        (Kind.FAILED, b"{}"),
        (Kind.FAILED, b'{"code":1}'),
        (Kind.FAILED, b'{"code":"engine","definite":"yes"}'),
        (Kind.PROLOGUE, b"text"),
        (Kind.PROLOGUE, b"{}"),
        (Kind.PROLOGUE, b'{"code":1}'),
        (Kind.REFUSED, b""),
        (Kind.REFUSED, b"{}"),
        (Kind.REFUSED, b'{"code":"x"} {}'),
        (Kind.DATA, b"x"),
        (0, b""),
        (99, b""),
    ],
)
def test_a_frame_that_is_no_event_is_malformed(kind: int, data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_event(kind, header_of(kind), data)


@pytest.mark.parametrize(
    ("rest", "data"),
    [
        (bytes(4), b"s"),
        (bytes(6), b"s"),
        (bytes(4) + b"\2", b"s"),
        (bytes(5), b""),
        (bytes(5), b"s" * 129),
        (bytes(5), b"\xff"),
    ],
)
def test_an_opening_that_is_none_is_malformed(rest: bytes, data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_opening(header_of(Kind.OPEN) + rest, data)


def test_an_unknown_error_code_is_an_engine_error_of_that_text() -> None:
    said = b'{"code":"mars","message":"dust"}'
    event = parse_event(Kind.FAILED, header_of(Kind.FAILED), said)
    assert isinstance(event, Failed)
    assert type(event.error) is EngineError
    assert (event.error.message, event.error.definite) == ("dust", False)


@pytest.mark.parametrize("code", sorted(c.code for c in TrinamoError.__subclasses__()))
def test_every_code_a_peer_may_send_becomes_an_error(code: str) -> None:
    said = json.dumps({"code": code}).encode()
    event = parse_event(Kind.PROLOGUE, header_of(Kind.PROLOGUE), said)
    assert isinstance(event, Declined)
    assert isinstance(event.error, TrinamoError)
