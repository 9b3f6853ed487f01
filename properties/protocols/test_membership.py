"""Who knows the secret is greeted however its bytes are cut, and nobody else is, whatever it says."""

from __future__ import annotations

import contextlib

from hypothesis import assume, example, given, strategies as st

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.streams.membership import (
    NONCE_BYTES,
    Greeting,
    GreetingState,
    Purpose,
)

nonces = st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES)
secrets = st.binary(max_size=40)
names = st.text(max_size=60)
CHALLENGE_BYTES = 3 + NONCE_BYTES


def play(
    dialler: Greeting, listener: Greeting, cuts: list[int], change: tuple[int, int] | None = None
) -> int:
    """Both ends, each hearing at most `cuts` bytes at once; bit `change` of all that is said flips.

    Returns how many bytes were said. Raises what an end raises.
    """
    place, count, turn = 0, 0, 0
    words, hears = dialler.begin(), listener
    while words:
        if change is not None and count <= change[0] < count + len(words):
            spoilt = bytearray(words)
            spoilt[change[0] - count] ^= 1 << change[1]
            words = bytes(spoilt)
        count += len(words)
        answer = b""
        while words:
            size = max(1, min(cuts[turn % len(cuts)], hears.wanted_bytes))
            turn += 1
            answer += hears.receive(words[:size])
            words = words[size:]
        hears, words = (dialler if hears is listener else listener), answer
        place += 1
    return count


def ends(
    ours: bytes, theirs: bytes, first: bytes, second: bytes, name: str
) -> tuple[Greeting, Greeting]:
    return (
        Greeting.dialling(Purpose.REQUESTS, ours, first),
        Greeting.listening(Purpose.REQUESTS, theirs, second, name),
    )


@given(secrets, nonces, nonces, names, st.lists(st.integers(1, 64), min_size=1))
def test_members_greet_however_their_bytes_are_cut(
    secret: bytes, first: bytes, second: bytes, name: str, cuts: list[int]
) -> None:
    """Both ends are greeted, the name arrives, and not 1 KiB was said."""
    dialler, listener = ends(secret, secret, first, second, name)
    assert play(dialler, listener, cuts) < 1024
    assert (dialler.is_over, listener.is_over, dialler.peer_name) == (True, True, name)


@given(secrets, nonces, nonces, names, st.lists(st.integers(1, 64), min_size=1), st.data())
def test_no_bit_may_be_changed_between_them(
    secret: bytes, first: bytes, second: bytes, name: str, cuts: list[int], data: st.DataObject
) -> None:
    """With any one bit flipped on the way, the dialler is not greeted: it never trusts what it
    did not hear right, its own words as the listener heard them included."""
    whole = play(*ends(secret, secret, first, second, name), cuts)
    change = data.draw(st.tuples(st.integers(0, whole - 1), st.integers(0, 7)))
    dialler, listener = ends(secret, secret, first, second, name)
    with contextlib.suppress(RemoteProtocolError):
        play(dialler, listener, cuts, change)
    assert not dialler.is_over


@given(secrets, secrets, nonces, nonces, names, st.lists(st.integers(1, 64), min_size=1))
@example(b"", bytes(16), bytes(16), bytes(16), "", [64])
def test_another_secret_greets_nobody(
    ours: bytes, theirs: bytes, first: bytes, second: bytes, name: str, cuts: list[int]
) -> None:
    """Neither end is greeted, and the listener has said no more than its challenge."""
    assume(ours != theirs)
    dialler, listener = ends(ours, theirs, first, second, name)
    with contextlib.suppress(RemoteProtocolError):
        play(dialler, listener, cuts)
    assert (dialler.is_over, listener.is_over) == (False, False)


@given(secrets, nonces, st.lists(st.binary(max_size=40), max_size=20))
def test_a_stranger_hears_a_challenge_at_most(
    secret: bytes, nonce: bytes, pieces: list[bytes]
) -> None:
    """Whatever bytes come, a listener is not greeted, keeps a bounded number of them, and raises
    nothing but `RemoteProtocolError`."""
    listener = Greeting.listening(Purpose.TRANSFERS, secret, nonce, "a secret name")
    said = b""
    try:
        for piece in pieces:
            if not piece[: listener.wanted_bytes]:
                continue
            said += listener.receive(piece[: listener.wanted_bytes])
    except RemoteProtocolError:
        assert listener.state is GreetingState.REFUSED
    assert not listener.is_over
    assert len(said) in (0, CHALLENGE_BYTES)
    assert b"a secret name" not in said
