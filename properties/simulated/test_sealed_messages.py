"""Sealed messages by way of a broker that loses, repeats, turns round and changes them."""

from __future__ import annotations

import random

from hypothesis import given, strategies as st

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.transports.security.sealing import WINDOW, Arrivals, Sealer

SECRET = bytes(range(32))
ARRIVALS = st.lists(
    st.one_of(st.integers(0, 12), st.integers(0, 3 * WINDOW), st.integers(WINDOW - 3, WINDOW + 3)),
    max_size=40,
)


@given(ARRIVALS)
def test_each_comes_once_at_most_and_is_lost_only_behind_the_window(arrivals: list[int]) -> None:
    sender, receiver = Sealer([SECRET], random.Random(1)), Sealer([SECRET], random.Random(2))
    said = [sender.seal(b"%d" % number, b"") for number in range(max(arrivals, default=0) + 1)]
    came: set[int] = set()
    once = Arrivals()
    for number in arrivals:
        is_due = number not in came and number > max(came, default=0) - WINDOW
        try:
            assert receiver.open(said[number], b"", once=once) == b"%d" % number
        except RemoteProtocolError:
            assert not is_due
        else:
            assert is_due
            came.add(number)


@given(st.binary(max_size=64), st.binary(max_size=16), st.binary(max_size=16), st.data())
def test_nothing_opens_that_was_not_said_about_this(
    message: bytes, about: bytes, other: bytes, data: st.DataObject
) -> None:
    sealed = Sealer([SECRET], random.Random(1)).seal(message, about)
    at = data.draw(st.integers(0, len(sealed)))
    cut = data.draw(st.integers(at, len(sealed)))
    changed = sealed[:at] + data.draw(st.binary(max_size=32)) + sealed[cut:]
    receiver = Sealer([SECRET], random.Random(2))
    try:
        assert receiver.open(changed, other) == message
    except RemoteProtocolError:
        assert (changed, other) != (sealed, about)
    else:
        assert (changed, other) == (sealed, about)
