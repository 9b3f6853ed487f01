"""Legs as OpenTelemetry's spans: of the traces of a cluster, across its processes.

The legs of one request in one process are a tree of two levels: its first leg (`http`, `worker`,
`caller`, `put`, `job`) and what came before it (`wait`) are children of whoever asked, all others
are the first one's. What an `attempt`, a `put` or a `queue` leg asks of another process is that
one's child, by the `traceparent` that travels along. Whether a trace is sampled, its root decides;
spans of one that is not have ids all the same, so that nobody below decides again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import attrs

from ..env import Env
from ..protocol.traceparent import TraceParent, decode_traceparent, encode_traceparent
from .trace import Fact, Leg, RequestTrace

_TRACE_BITS: Final = 128
_SPAN_BITS: Final = 64
# Where the id of the span stands in a `traceparent`.
_SPAN_AT: Final = 36
_SPAN_DIGITS: Final = 16
_RATIO_MASK: Final = 2**64 - 1


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


class Tracing:
    """The spans of one process; `sample_ratio` is the share of new traces that is kept."""

    def __init__(self, sink: SpanSink, env: Env, *, sample_ratio: float) -> None:
        self._sink = sink
        self._wall, self._rng = env.clock.wall, env.rng
        self.now = env.clock.now
        """The process's clock."""
        # Of the id's lower half, as OpenTelemetry's own samplers decide, so that they agree.
        self._sampled_below = round(sample_ratio * 2**64)

    def begin(self, request_id: str, traceparent: str) -> SpanTrace:
        """The trace of a request whose caller said `traceparent`; of a new one if that is none."""
        parent = decode_traceparent(traceparent) if traceparent else None
        if parent is None:
            trace_id = self._rng.getrandbits(_TRACE_BITS) or 1
            is_sampled = trace_id & _RATIO_MASK < self._sampled_below
            parent = TraceParent(trace_id, 0, is_sampled)
        return SpanTrace(self, request_id, parent)

    def new_span_id(self) -> int:
        return self._rng.getrandbits(_SPAN_BITS) or 1

    def ended(self, trace: SpanTrace, leg: _SpanLeg) -> None:
        """A leg is over: its span goes out."""
        if not trace.parent.is_sampled:
            return
        assert leg.end is not None
        # It ended just now; see `Traces.offset_s`.
        offset = self._wall() - leg.end
        self._sink.take(
            Span(
                name=leg.name,
                request_id=trace.request_id,
                trace_id=trace.parent.trace_id,
                span_id=leg.span_id,
                parent_id=leg.parent_id,
                start=leg.start + offset,
                end=leg.end + offset,
                marks=[(name, at + offset) for name, at in leg.marks],
                facts=leg.facts,
            )
        )


class SpanTrace(RequestTrace):
    """A trace whose legs are spans."""

    __slots__ = ("_prefix", "_root_id", "_suffix", "_tracing", "parent")

    def __init__(self, tracing: Tracing, request_id: str, parent: TraceParent) -> None:
        super().__init__(tracing.now, request_id)
        self._tracing = tracing
        self.parent = parent
        """Who asked; span 0 of a trace that begins here."""
        known = encode_traceparent(parent)
        self._prefix, self._suffix = known[:_SPAN_AT], known[_SPAN_AT + _SPAN_DIGITS :]
        self._root_id = 0
        self.traceparent = self.parent_of(parent.span_id)
        """Of the request's span in this process, once there is one."""

    @property
    def is_exported(self) -> bool:
        return self.parent.is_sampled

    def parent_of(self, span_id: int) -> str:
        """What travels to whoever works for that span; empty before there is any."""
        if not span_id:
            return ""
        return f"{self._prefix}{span_id:016x}{self._suffix}"

    def begin(self, name: str, at: float | None = None, **facts: Fact) -> Leg:
        return self._begin(name, self._now() if at is None else at, facts)

    def _begin(self, name: str, start: float, facts: dict[str, Fact]) -> _SpanLeg:
        leg = _SpanLeg(self._tracing, self, name, start, facts)
        leg.parent_id = self._root_id or self.parent.span_id
        if not self._root_id:
            self._root_id, self.traceparent = leg.span_id, leg.traceparent
        self._keep(leg)
        return leg

    def precede(self, name: str, lasted_s: float, **facts: Fact) -> None:
        """As of any trace: the caller's child, if there is one, as the first leg is."""
        leg = self._begin(name, self._now() - lasted_s, facts)
        leg.parent_id = self.parent.span_id or leg.parent_id
        leg.finish()


class _SpanLeg(Leg):
    __slots__ = ("_trace", "_tracing", "parent_id", "span_id")

    def __init__(
        self, tracing: Tracing, trace: SpanTrace, name: str, start: float, facts: dict[str, Fact]
    ) -> None:
        super().__init__(tracing.now, name, start, facts)
        self._tracing, self._trace = tracing, trace
        self.span_id = tracing.new_span_id()
        self.parent_id = 0
        self.traceparent = trace.parent_of(self.span_id)

    def finish(self, outcome: str = "success", **facts: Fact) -> None:
        if self.end is None:
            super().finish(outcome, **facts)
            self._tracing.ended(self._trace, self)
