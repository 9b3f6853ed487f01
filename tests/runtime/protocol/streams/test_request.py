from __future__ import annotations

import pytest

from trinamo.runtime.errors import (
    EngineError,
    OverloadedError,
    RemoteProtocolError,
    RequestError,
    TrinamoError,
    UnavailableError,
)
from trinamo.runtime.protocol.streams.codec import HEADER_BYTES_MAX
from trinamo.runtime.protocol.streams.request import (
    REQUEST_ID_CHARS_MAX,
    AckStatus,
    Cancel,
    ConnectionInfo,
    Envelope,
    Reason,
    RequestAnswer,
    RequestKind,
    StreamType,
    decode_answer,
    decode_cancel,
    decode_envelope,
    encode_answer,
    encode_cancel,
    encode_envelope,
    failure,
    raise_for_nack,
    readable_id,
)

HOME = ConnectionInfo("127.0.0.1:1", "subject", StreamType.RESPONSE)
INPUT = ConnectionInfo("127.0.0.1:1", "other", StreamType.REQUEST)


@pytest.mark.parametrize(
    "envelope",
    [
        Envelope(id="r", endpoint="a/b/c", response=HOME),
        Envelope(
            id="r" * REQUEST_ID_CHARS_MAX,
            endpoint="a/b/c",
            instance_id="1f",
            response=HOME,
            request=INPUT,
        ),
        Envelope(id="r", endpoint="a/b/c", kind=RequestKind.UNARY),
    ],
)
def test_an_envelope_comes_back_as_it_was(envelope: Envelope) -> None:
    assert decode_envelope(encode_envelope(envelope)) == envelope


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"x",
        b"\xff",
        b"[" * 100_000,
        b"{}",
        b'{"id":1,"endpoint":"a/b/c"}',
        encode_envelope(Envelope(id="", endpoint="a/b/c", response=HOME)),
        encode_envelope(Envelope(id="x" * 129, endpoint="a/b/c", response=HOME)),
        encode_envelope(Envelope(id="r", endpoint="a/b/c")),
        b'{"id":"r","endpoint":"a","kind":"push"}',
        b'{"id":"r","endpoint":"a","response":{"address":"a","subject":"s"}}',
        b'{"id":"r","endpoint":"a","kind":"unary","instance_id":1}',
    ],
)
def test_a_header_that_is_no_envelope_is_malformed(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_envelope(header)


@pytest.mark.parametrize("status", list(AckStatus))
def test_every_ack_and_nack_comes_back_as_itself(status: AckStatus) -> None:
    ack = RequestAnswer(id="r", status=status, message="why")
    assert decode_answer(encode_answer(ack)).ack == ack


def test_a_failure_carries_the_three_fields_of_its_error() -> None:
    answer = decode_answer(encode_answer(failure("r", EngineError("oops", definite=True))))
    assert answer.error is not None
    assert (answer.error.code, answer.error.message, answer.error.definite) == (
        "engine",
        "oops",
        True,
    )
    with pytest.raises(RemoteProtocolError):
        _ = answer.ack


def test_the_text_of_a_failure_is_cut_to_fit_a_header() -> None:
    assert len(encode_answer(failure("r", EngineError("x" * HEADER_BYTES_MAX)))) < HEADER_BYTES_MAX


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"OK",
        b"{}",
        b'{"id":"r"}',
        b'{"id":"r","status":"queued"}',
        encode_answer(RequestAnswer(id="r")),
        encode_answer(
            RequestAnswer(
                id="r", status=AckStatus.ACCEPTED, error=failure("r", EngineError("")).error
            )
        ),
    ],
)
def test_an_answer_that_is_neither_ack_nor_nack_nor_error_is_never_a_success(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_answer(header)


def test_a_cancel_names_its_request() -> None:
    assert decode_cancel(encode_cancel("r1")) == Cancel("r1", Reason.CONSUMER_DROPPED)
    assert encode_cancel("r1") == b'{"cancel":"r1"}'
    assert decode_cancel(encode_envelope(Envelope(id="r", endpoint="a", response=HOME))) is None
    long = decode_cancel(encode_cancel("r" * 1000))
    assert long is not None
    assert len(long.request_id) == REQUEST_ID_CHARS_MAX


@pytest.mark.parametrize("reason", Reason)
def test_a_cancel_says_why(reason: Reason) -> None:
    assert decode_cancel(encode_cancel("r1", reason)) == Cancel("r1", reason)


def test_an_unknown_reason_of_a_cancel_is_that_the_caller_left() -> None:
    cancel = decode_cancel(b'{"cancel":"r1","reason":"boredom"}')
    assert cancel == Cancel("r1", Reason.CONSUMER_DROPPED)


def test_a_field_of_a_cancel_that_a_newer_minor_adds_is_skipped() -> None:
    assert decode_cancel(b'{"cancel":"r1","new":1}') == Cancel("r1", Reason.CONSUMER_DROPPED)


@pytest.mark.parametrize("header", [b'{"cancel":', b'{"cancel":1}'])
def test_a_cancel_that_is_none_is_malformed(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_cancel(header)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (AckStatus.OVERLOADED, OverloadedError),
        (AckStatus.DRAINING, UnavailableError),
        (AckStatus.UNKNOWN_ENDPOINT, UnavailableError),
        (AckStatus.INVALID, RequestError),
    ],
)
@pytest.mark.parametrize("message", ["", "in words"])
def test_a_nack_is_a_definite_error(
    status: AckStatus, error: type[TrinamoError], message: str
) -> None:
    with pytest.raises(error) as caught:
        raise_for_nack(RequestAnswer(id="r", status=status, message=message))
    assert caught.value.definite
    assert caught.value.message
    assert message in caught.value.message


def test_an_ack_raises_nothing() -> None:
    raise_for_nack(RequestAnswer(id="r", status=AckStatus.ACCEPTED))


@pytest.mark.parametrize(
    ("header", "request_id"),
    [
        (b'{"id":"r1"}', "r1"),
        (b'{"kind":7,"id":"r1","more":[{}]}', "r1"),
        (b'{"id":"' + b"x" * 1024 + b'"}', "x" * 1024),
        (b'{"id":"' + b"x" * 1025 + b'"}', ""),
        (b'{"id":7}', ""),
        (b"{}", ""),
        (b"[]", ""),
        (b"", ""),
        (b"\xff", ""),
        (b"[" * 50_000, ""),
    ],
)
def test_an_id_is_read_from_what_is_otherwise_nonsense(header: bytes, request_id: str) -> None:
    assert readable_id(header) == request_id
