"""Spans on their way out of the process: what a transport takes that brings them to a collector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs


@attrs.define(kw_only=True)
class Span:
    """One part of a request's way that is over. Times are seconds since the Unix epoch."""

    # Not frozen: that triples what making one costs.

    name: str
    request_id: str
    """As the request is called in this process."""
    trace_id: int
    span_id: int
    parent_id: int
    """Of the span that it is a part of, here or in another process; 0: of none."""
    start: float
    end: float
    marks: Sequence[tuple[str, float]]
    """What was reached on the way, and when."""
    facts: Mapping[str, str | int | float]


class SpanSink(Protocol):
    """Takes spans, and brings them where they are kept, by and by."""

    def take(self, span: Span) -> None:
        """Take one that is over. Does not wait, and drops what it has no room for; never raises."""
        ...
