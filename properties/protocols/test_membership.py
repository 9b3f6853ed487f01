"""A greeting is understood however its bytes are cut, in no other bytes than were said, and with one secret."""

from __future__ import annotations

import random
import ssl
from contextlib import suppress

import pytest
from hypothesis import assume, given, settings, strategies as st

from tests.transports.security.test_identity import SetEnv, shake
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
from trinamo.transports.security.identity import Authority, Identity

names = st.text(max_size=60)
purposes = st.sampled_from(Purpose)


@given(purposes, names, st.booleans(), st.lists(st.integers(1, 64), min_size=1))
def test_members_greet_however_their_bytes_are_cut(
    purpose: Purpose, name: str, sealed: bool, cuts: list[int]
) -> None:
    """No byte of what follows is asked for, and the name arrives."""
    hello = encode_hello(purpose, sealed=sealed)
    check_hello(hello, purpose, sealed=sealed)
    rest, heard, turn = encode_welcome(hello, name) + b"what follows", b"", 0
    while wanted := wanted_bytes(heard, hello):
        size = min(cuts[turn % len(cuts)], wanted)
        heard, rest, turn = heard + rest[:size], rest[size:], turn + 1
    assert rest == b"what follows"
    assert decode_welcome(heard, hello) == name


@given(purposes, names, st.booleans(), st.data())
def test_no_bit_of_a_hello_may_be_changed_on_its_way(
    purpose: Purpose, name: str, sealed: bool, data: st.DataObject
) -> None:
    """Whatever the listener makes of it, the dialler does not take its welcome."""
    hello = encode_hello(purpose, sealed=sealed)
    spoilt = bytearray(hello)
    spoilt[data.draw(st.integers(0, HELLO_BYTES - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decode_welcome(encode_welcome(bytes(spoilt), name), hello)
    except RemoteProtocolError:
        return
    raise AssertionError("welcome for what was not said")


@given(st.binary(max_size=400), st.binary(min_size=HELLO_BYTES, max_size=HELLO_BYTES))
def test_other_bytes_raise_nothing_but_a_protocol_error(said: bytes, hello: bytes) -> None:
    for step in (
        lambda: check_hello(hello, Purpose.STREAMS, sealed=True),
        lambda: check_version(hello),
        lambda: decode_welcome(said, hello),
    ):
        with suppress(RemoteProtocolError):
            step()


long_secrets = st.binary(min_size=32, max_size=100)


@settings(max_examples=30)
@given(long_secrets, long_secrets, st.integers())
def test_another_secret_is_another_authority_and_refused_by_both_ends(
    ours: bytes, theirs: bytes, seed: int
) -> None:
    assume(ours != theirs)
    assert Authority.derived(ours).certificate != Authority.derived(theirs).certificate
    one, other = (
        Identity(each, "trinamo://requests/7f", SetEnv(rng=random.Random(seed)))
        for each in (ours, theirs)
    )
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(one.session(dials=True), other.session(dials=False))
    # As one would dial who does not look.
    one._contexts[0].verify_mode = ssl.CERT_NONE
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(one.session(dials=True), other.session(dials=False))
