from __future__ import annotations

import json
from typing import Any

import pytest

from trinamo.runtime.errors import (
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
from trinamo.runtime.protocol.streams.codec import HEADER_BYTES_MAX, decode_frame, encode_frame
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
    encode_control,
    parse_frame,
)
from trinamo.runtime.protocol.streams.link_frames import Kind, parse_event
from trinamo.runtime.protocol.streams.reasons import Reason
from trinamo.runtime.protocol.streams.request import StreamType


def round_trip(event: Control) -> Control | None:
    return parse_frame(decode_frame(encode_control(event)))


@pytest.mark.parametrize(
    ("event", "header"),
    [
        (
            Handshake("ab12", StreamType.RESPONSE),
            {"subject": "ab12", "stream_type": "Response"},
        ),
        (Handshake("ab12", StreamType.REQUEST), {"subject": "ab12", "stream_type": "Request"}),
        (Opened(), {"error": None}),
        (Sentinel(), "Sentinel"),
        (Stop(), "Stop"),
        (Kill(), "Kill"),
        (
            Refused("taken_subject", "no"),
            {"refused": {"code": "taken_subject", "message": "no"}},
        ),
    ],
)
def test_a_control_frame_is_the_json_of_the_specification_and_comes_back(
    event: Control, header: Any
) -> None:
    encoded, data = decode_frame(encode_control(event))
    assert (json.loads(encoded), data) == (header, b"")
    assert round_trip(event) == event


@pytest.mark.parametrize("reason", Reason)
def test_a_stop_and_a_kill_say_why_unless_it_is_the_usual_reason(reason: Reason) -> None:
    stop, kill = round_trip(Stop(reason)), round_trip(Kill(reason))
    assert (stop, kill) == (Stop(reason), Kill(reason))
    headers = [decode_frame(encode_control(event))[0] for event in (Stop(reason), Kill(reason))]
    is_usual = (reason is Reason.STOP_REQUESTED, reason is Reason.CONSUMER_DROPPED)
    assert [header in (b'"Stop"', b'"Kill"') for header in headers] == list(is_usual)


def test_a_reason_of_another_version_is_the_usual_one() -> None:
    words = (b'{"stop":"boredom"}', b'{"kill":"boredom"}')
    assert [parse_frame((word, b"")) for word in words] == [Stop(), Kill()]
    events = [parse_event(kind, bytes(5), b"bore\xffdom") for kind in (Kind.STOP, Kind.KILL)]
    assert events == [Stop(), Kill()]


@pytest.mark.parametrize(
    "error",
    [
        EngineError("broken", definite=True),
        EngineError("broken"),
        RequestError("too long"),
        OverloadedError("full"),
        UnavailableError("draining"),
        DisconnectedError("the worker shut down"),
    ],
)
def test_a_typed_error_comes_back_as_itself_in_prologue_and_end(error: TrinamoError) -> None:
    for event in (Declined(error), Failed(error)):
        back = round_trip(event)
        assert type(back) is type(event)
        assert isinstance(back, (Declined, Failed))
        assert type(back.error) is type(error)
        assert (back.error.message, back.error.definite) == (error.message, error.definite)


@pytest.mark.parametrize("error", [KilledError("k"), LocalProtocolError("bug")])
def test_an_error_that_only_makes_sense_at_home_arrives_as_an_engine_error(
    error: TrinamoError,
) -> None:
    back = round_trip(Failed(error))
    assert isinstance(back, Failed)
    assert type(back.error) is EngineError


def test_an_error_text_longer_than_a_header_is_cut_not_lost() -> None:
    """Sent whole it would be an oversize frame, and the caller would never learn what failed."""
    frame = decode_frame(encode_control(Failed(EngineError("é" * HEADER_BYTES_MAX))))
    back = parse_frame(frame)
    assert isinstance(back, Failed)
    assert set(back.error.message) == {"é"}


def test_an_item_is_a_data_only_frame() -> None:
    assert decode_frame(encode_control(Data(b"x"))) == (b"", b"x")
    assert round_trip(Data(b"x")) == Data(b"x")


def test_an_empty_frame_means_nothing() -> None:
    assert parse_frame((b"", b"")) is None


@pytest.mark.parametrize("event", [Data(b""), Closed()])
def test_what_has_no_frame_cannot_be_encoded(event: Control) -> None:
    with pytest.raises(AssertionError):
        encode_control(event)


@pytest.mark.parametrize("event", [Sentinel(), Stop(), Kill(), Opened()])
def test_a_control_frame_with_data_is_malformed(event: Control) -> None:
    header, _ = decode_frame(encode_control(event))
    with pytest.raises(RemoteProtocolError, match="carries 1 bytes of data"):
        parse_frame((header, b"x"))


@pytest.mark.parametrize(
    "header",
    [
        b"x",
        b"\xff\xfe",
        b'"\\ud800"',
        b"null",
        b"1",
        b"9" * 5000,
        b"[]",
        b"[" * 100_000,
        b"{}",
        b'"stop"',
        b'"Sentinel" ""',
        b'{"subject":"s"}',
        b'{"subject":"","stream_type":"Response"}',
        b'{"subject":"%s","stream_type":"Response"}' % (b"s" * 129),
        b'{"subject":1,"stream_type":"Response"}',
        b'{"subject":"s","stream_type":"response"}',
        b'{"subject":"s","stream_type":"Response","more":1}',
        b'{"error":"text"}',
        b'{"error":{}}',
        b'{"error":{"code":1}}',
        b'{"error":null,"failed":{"code":"engine"}}',
        b'{"failed":null}',
        b'{"failed":{"code":"engine","definite":"yes"}}',
        b'{"refused":{}}',
        b'{"Kill":1}',
        b'{"kill":1}',
        b'{"stop":null}',
        b'{"kill":"deadline","more":1}',
    ],
)
def test_a_header_that_is_no_control_message_is_malformed(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_frame((header, b""))


def test_an_unknown_error_code_is_an_engine_error_of_that_text() -> None:
    event = parse_frame(decode_frame(encode_frame(b'{"failed":{"code":"mars","message":"dust"}}')))
    assert isinstance(event, Failed)
    assert type(event.error) is EngineError
    assert (event.error.message, event.error.definite) == ("dust", False)


@pytest.mark.parametrize("code", sorted(c.code for c in TrinamoError.__subclasses__()))
def test_every_code_a_peer_may_send_becomes_an_error(code: str) -> None:
    event = parse_frame((b'{"error":{"code":"%s"}}' % code.encode(), b""))
    assert isinstance(event, Declined)
    assert isinstance(event.error, TrinamoError)
