"""The header `traceparent` of W3C trace context: which span of which trace asks, and whether it is kept.

https://www.w3.org/TR/trace-context/. What a stranger writes that is none counts as absent; `tracestate`
is not passed on.
"""

from __future__ import annotations

import re
from typing import Final

import attrs

TRACEPARENT_CHARS_MAX: Final = 256
_SHAPE: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1


@attrs.frozen
class TraceParent:
    """A span somewhere, as its children know it; neither id is 0."""

    trace_id: int
    span_id: int
    is_sampled: bool


def encode_traceparent(parent: TraceParent) -> str:
    """As it travels, by version 00."""
    return f"00-{parent.trace_id:032x}-{parent.span_id:016x}-{_SAMPLED * parent.is_sampled:02x}"


def decode_traceparent(text: str) -> TraceParent | None:
    """What a header says, of this version or a later one; None if it is malformed, or too long to travel."""
    found = None if len(text) > TRACEPARENT_CHARS_MAX else _SHAPE.fullmatch(text)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more is not None):
        return None
    parent = TraceParent(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))
    return parent if parent.trace_id and parent.span_id else None
