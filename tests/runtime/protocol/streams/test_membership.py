"""What both ends of a greeting say, and whom they turn away with which words."""

from __future__ import annotations

import pytest

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.streams.membership import (
    HELLO_BYTES,
    Purpose,
    check_hello,
    check_version,
    decode_welcome,
    encode_hello,
    encode_welcome,
    wanted_bytes,
)
from trinamo.runtime.protocol.versions import SPOKEN, Version

HELLO = encode_hello(Purpose.REQUESTS, sealed=True)
NEXT_MAJOR = Version(SPOKEN[-1].major + 1, 0)
NEXT_MINOR = Version(SPOKEN[-1].major, SPOKEN[-1].minor + 1)


def test_these_bytes_are_the_greeting_of_protocol_3_0() -> None:
    assert HELLO == b"trinamo\r\n\r\n\x03\x00r\x01"
    assert encode_hello(Purpose.STREAMS, sealed=False) == b"trinamo\r\n\r\n\x03\x00s\x00"
    assert len(HELLO) == HELLO_BYTES
    assert encode_welcome(HELLO, "7f") == b"\x03\x00" + HELLO + b"\x027f"


def test_a_hello_ends_like_the_head_of_an_http_request() -> None:
    """A server of HTTP answers it at once, instead of waiting for the rest."""
    assert b"\r\n\r\n" in HELLO


@pytest.mark.parametrize("name", ["", "7f", "ä" * 127])
def test_the_listener_s_name_arrives(name: str) -> None:
    check_hello(HELLO, Purpose.REQUESTS, sealed=True)
    check_version(HELLO)
    assert decode_welcome(encode_welcome(HELLO, name), HELLO) == name


@pytest.mark.parametrize("purpose", [Purpose.STREAMS, Purpose.TRANSFERS])
def test_who_wants_another_port_is_turned_away(purpose: Purpose) -> None:
    with pytest.raises(RemoteProtocolError, match=f"another port than that of {purpose}"):
        check_hello(HELLO, purpose, sealed=True)


@pytest.mark.parametrize(
    ("ours", "words"), [(True, "has no .* has one"), (False, "has a .* has none")]
)
def test_a_secret_at_one_end_only_is_told_as_that(ours: bool, words: str) -> None:
    hello = encode_hello(Purpose.REQUESTS, sealed=not ours)
    with pytest.raises(RemoteProtocolError, match=words):
        check_hello(hello, Purpose.REQUESTS, sealed=ours)


def test_another_protocol_is_turned_away() -> None:
    with pytest.raises(RemoteProtocolError, match="another protocol"):
        check_hello(b"GET / HTTP/1.1\r"[:HELLO_BYTES], Purpose.REQUESTS, sealed=True)
    with pytest.raises(RemoteProtocolError, match="did not answer the greeting"):
        wanted_bytes(b"HTT", HELLO)


def test_another_major_version_is_turned_away_by_both_ends_with_what_to_do() -> None:
    theirs = encode_hello(Purpose.REQUESTS, sealed=True, version=NEXT_MAJOR)
    check_hello(theirs, Purpose.REQUESTS, sealed=True)
    for said in (
        lambda: check_version(theirs),
        lambda: decode_welcome(encode_welcome(HELLO, "7f", version=NEXT_MAJOR), HELLO),
    ):
        with pytest.raises(
            RemoteProtocolError,
            match=f"protocol {NEXT_MAJOR}, and this process {SPOKEN[-1]}: .*upgraded",
        ):
            said()


def test_another_minor_version_is_welcome() -> None:
    check_version(encode_hello(Purpose.REQUESTS, sealed=True, version=NEXT_MINOR))
    assert decode_welcome(encode_welcome(HELLO, "7f", version=NEXT_MINOR), HELLO) == "7f"


def test_a_name_that_is_no_text_is_an_error() -> None:
    said = bytearray(encode_welcome(HELLO, "7f"))
    said[-1] = 0xFF
    assert wanted_bytes(bytes(said), HELLO) == 0
    with pytest.raises(RemoteProtocolError, match="no text"):
        decode_welcome(bytes(said), HELLO)
