"""Events of upstreams: the same however the bytes are cut, and the same as text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, strategies as st

from tests.sse import parse_events
from tests.transports.openai.dialects import DIALECTS, Dialect, read
from trinamo.runtime.protocol.openai.passing import COMMENT
from trinamo.transports.openai.events import EventSplitter

EVENT_BYTES_MAX = 1 << 16


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(each % (len(data) + 1) for each in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


named = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.name)


@named
@given(places=st.lists(st.integers(0, 1 << 16), max_size=40))
def test_the_answer_is_the_same_however_its_bytes_are_cut(
    dialect: Dialect, places: list[int]
) -> None:
    """For every cut of every dialect: the same deltas, the same end.

    But for comments, which are no part of the answer: one passes if nothing else came with it.
    """
    expected, _ = read([dialect.body])
    found, answer = read(cut(dialect.body, places))

    assert answer.error is None
    assert [each for each in found if each.raw != COMMENT] == expected


@given(
    lines=st.lists(
        st.sampled_from(
            [
                "data: {}",
                "data:x",
                "data: a: b",
                ": ping",
                "event: e",
                "id: 7",
                "",
                "data",
                "retry: 1",
            ]
        ),
        max_size=12,
    ),
    ends=st.lists(st.sampled_from(["\n", "\r\n", "\r"]), min_size=12, max_size=12),
    places=st.lists(st.integers(0, 1 << 16), max_size=20),
)
@example(lines=["data: {}"], ends=["\r\n"] * 12, places=[10, 10, 11, 11])
def test_bytes_and_text_are_cut_into_the_same_events(
    lines: list[str], ends: list[str], places: list[int]
) -> None:
    """The splitter of bytes finds what the parser of text finds, for any lines, ends and cuts.

    But for events whose data is blank: gateways keep connections alive by them.
    """
    data = "".join(map("".join, zip(lines, ends, strict=False))).encode() + b"\n\n"
    splitter = EventSplitter(EVENT_BYTES_MAX)
    found = [event for piece in cut(data, places) for event in splitter.feed(piece)]

    assert [(each.event.decode(), each.data.decode()) for each in found] == [
        (each.event, each.data) for each in parse_events(data) if each.data.strip()
    ]
