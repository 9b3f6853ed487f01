"""Strategies several properties share: splits of bytes, protocol steps, cluster entries."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from trinamo.runtime.errors import ContextLengthError, EngineError
from trinamo.runtime.protocol.discovery.instances import Instance
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
from trinamo.runtime.protocol.streams.request import Reason, StreamType

cuts = st.lists(st.integers(min_value=0), max_size=12)
"""Where to cut a byte string, modulo its length; see `cut`."""

frames = st.lists(
    st.tuples(st.binary(max_size=40), st.binary(max_size=200)), min_size=0, max_size=8
)
"""Frames of both parts, either of which may be empty."""


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """`data` in pieces, some of them empty."""
    ends = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(ends)]


_errors = st.builds(EngineError, st.text(max_size=20), definite=st.booleans()) | st.builds(
    ContextLengthError, st.text(max_size=20), param=st.none() | st.text(min_size=1, max_size=20)
)

controls: st.SearchStrategy[Control] = st.one_of(
    st.builds(Opened),
    st.builds(Declined, _errors),
    st.builds(Sentinel),
    st.builds(Closed),
    st.builds(Failed, _errors),
    st.builds(Stop, st.sampled_from(Reason)),
    st.builds(Kill, st.sampled_from(Reason)),
    st.builds(Refused, st.text(max_size=10), st.text(max_size=20)),
)
"""Everything that `encode_event` makes a frame of, with any legal content."""

WORDS: list[Control] = [
    Handshake("s", StreamType.RESPONSE),
    Opened(),
    Declined(EngineError("")),
    Data(b"x"),
    Sentinel(),
    Failed(EngineError("")),
    Stop(),
    Kill(),
    Refused("", ""),
    Closed(),
]
"""One of every step there is, for walks over the tables."""
events = st.sampled_from(WORDS)

instances = st.builds(
    Instance,
    endpoint=st.just("a/b/c"),
    id=st.sampled_from("1234"),
    transports=st.just({"tcp": "h:1"}),
    incarnation=st.integers(1, 3),
    draining=st.booleans(),
)
"""Few ids, so that instances meet themselves again."""
