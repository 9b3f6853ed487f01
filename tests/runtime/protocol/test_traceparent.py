"""The header `traceparent`, as W3C trace context has it."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from trinamo.runtime.protocol.traceparent import (
    TraceParent,
    decode_traceparent,
    encode_traceparent,
)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_the_example_of_the_specification_is_read_and_written() -> None:
    parent = decode_traceparent(f"00-{TRACE}-{SPAN}-01")
    assert parent == TraceParent(int(TRACE, 16), int(SPAN, 16), is_sampled=True)
    assert parent is not None
    assert encode_traceparent(parent) == f"00-{TRACE}-{SPAN}-01"


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_what_is_written_is_read(trace_id: int, span_id: int, is_sampled: bool) -> None:
    """Property: encoding then decoding gives the same, for every pair of ids."""
    parent = TraceParent(trace_id, span_id, is_sampled)
    assert decode_traceparent(encode_traceparent(parent)) == parent


@given(st.text(max_size=80) | st.text("0123456789abcdef-", max_size=80))
def test_no_text_of_a_stranger_s_raises(text: str) -> None:
    """Property: what is no traceparent is None, whatever it is."""
    found = decode_traceparent(text)
    assert found is None or (found.trace_id and found.span_id)


@pytest.mark.parametrize(
    ("text", "is_sampled"),
    [
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"01-{TRACE}-{SPAN}-01-of a later version", True),
    ],
)
def test_flags_and_later_versions_are_understood(text: str, is_sampled: bool) -> None:
    found = decode_traceparent(text)
    assert found is not None
    assert found.is_sampled is is_sampled


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01" + " " * 1000,
        f"01-{TRACE}-{SPAN}-01-{'x' * 256}",
    ],
)
def test_anything_else_counts_as_absent(text: str) -> None:
    assert decode_traceparent(text) is None
