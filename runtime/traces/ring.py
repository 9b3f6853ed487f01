"""The last requests of this process, in a ring: the newest take the place of the oldest.

Each is known by the id that it has here. What `find` is asked for may be any id of the request: the
client's `X-Request-Id`, the cluster's own, that of one choice of several, or that of one attempt at
one worker, which stands in the worker's log; each of these begins with the one before it
(`RequestIds.make`, `choices.py`, `attempt_id`). Or the id of the answer, which is the cluster's own
behind the word for its kind.
`view_requests` tells what is under way, and what failed last, each in a line.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Final

import msgspec

from ..env import Clock
from ..protocol.traceparent import decode_traceparent
from .spans import Tracing
from .trace import NO_TRACE, Fact, RequestTrace

FOUND_MAX: Final = 16
"""Traces told for one id. A client may give many of its requests the same."""
RECENT_MAX: Final = 50
SET_ASIDE_MAX: Final = 128
# Behind an id of our own alone: what a client calls its request may end so as well.
_ATTEMPTS: Final = re.compile(r"(?<=[0-9a-f]{16})(?:\.[0-9a-f]{1,8})+\Z")
_INNER: Final = re.compile(r"(?:-[0-9a-f]{16})?(?:\.[0-9a-f]{1,8})*\Z")
_ANSWER: Final = re.compile(r"\A(?:chatcmpl-|cmpl-|resp_|msg_)")
ID_CHARACTERS_MAX: Final = 256


class LegView(msgspec.Struct, kw_only=True):
    """One leg as it is told to others. Times are seconds since the Unix epoch, by this machine."""

    name: str
    start: float
    end: float | None = None
    marks: list[tuple[str, float]] = []
    facts: dict[str, Fact] = {}


class TraceView(msgspec.Struct, kw_only=True):
    """One request in one process."""

    request_id: str
    legs: list[LegView] = []
    legs_left_out: int = 0


class ProcessView(msgspec.Struct, kw_only=True):
    """What one process knows of a request: the newest of its traces that fit the id."""

    process: dict[str, str]
    """Who answers: `role`, and `instance` if it has one."""
    traces: list[TraceView] = []
    requests_max: int = 0
    """How many requests are kept; 0: none are."""


class RecentView(msgspec.Struct, kw_only=True):
    """The ids of the last requests, the newest first, without what an attempt adds to them."""

    request_ids: list[str] = []


class Traces:
    """The traces of one process: of the last `requests_max` requests, or of none if that is 0."""

    def __init__(
        self, clock: Clock, requests_max: int, tracing: Tracing | None = None, **process: str
    ) -> None:
        self._clock = clock
        self.requests_max = requests_max
        """How many are kept."""
        self._tracing = tracing
        self._process = process
        self._ring: deque[RequestTrace] = deque(maxlen=requests_max)
        self._set_aside: deque[RequestTrace] = deque(maxlen=min(SET_ASIDE_MAX, requests_max))
        """Those that failed, or were under way, when newer ones took their place."""

    def begin(self, request_id: str, traceparent: str = "") -> RequestTrace:
        """The trace of a request that has come; put it at the request's context.

        `traceparent` is what its caller said, from wherever. Where no legs become spans it is
        handed on as it is, unless it is malformed.
        """
        trace: RequestTrace
        if self._tracing is not None:
            trace = self._tracing.begin(request_id, traceparent)
        elif self.requests_max or traceparent:
            is_one = bool(traceparent) and decode_traceparent(traceparent) is not None
            trace = RequestTrace(self._clock.now, request_id, traceparent if is_one else "")
        else:
            return NO_TRACE
        ring = self._ring
        if self.requests_max and len(ring) == self.requests_max:
            oldest = ring[0]
            if oldest.legs and not oldest.is_good:
                self._set_aside.append(oldest)
        ring.append(trace)
        return trace

    @property
    def offset_s(self) -> float:
        """What makes a time of the process's clock one of the wall clock, as of now.

        The wall clock may jump: so it is read once for all times that are told together, which are
        then as far back from it as they are by the clock that does not.
        """
        return self._clock.wall() - self._clock.now()

    def newest_first(self) -> Iterator[RequestTrace]:
        """Those that are kept; failed ones, and those under way, for longer than the others."""
        return chain(reversed(self._ring), reversed(self._set_aside))

    def find(self, request_id: str) -> ProcessView:
        """What is kept of a request, by any of its ids or by the id of a job that it put."""
        offset = self.offset_s
        # What a client calls its request may look like an attempt's or an answer's: so it is looked for as it is, too.
        own_id = _ANSWER.sub("", request_id)
        roots = {root_of(own_id), root_of(request_id), request_id[:ID_CHARACTERS_MAX]}
        kept = chain(self._set_aside, self._ring)
        fitting = [
            each
            for each in kept
            if any(
                each.request_id.startswith(root) and _INNER.match(each.request_id, len(root))
                for root in roots
            )
            or any(leg.facts.get("job") in roots for leg in each.legs)
        ]
        return ProcessView(
            process=self._process,
            traces=[
                TraceView(
                    request_id=each.request_id,
                    legs=[
                        LegView(
                            name=leg.name,
                            start=leg.start + offset,
                            end=None if leg.end is None else leg.end + offset,
                            marks=[(name, at + offset) for name, at in leg.marks],
                            facts=leg.facts,
                        )
                        for leg in each.legs
                    ],
                    legs_left_out=each.legs_left_out,
                )
                for each in fitting[-FOUND_MAX:]
            ],
            requests_max=self.requests_max,
        )

    def recent(self) -> RecentView:
        ids = dict.fromkeys(root_of(each.request_id) for each in reversed(self._ring))
        return RecentView(request_ids=list(ids)[:RECENT_MAX])


def root_of(request_id: str) -> str:
    """The id of a request, of an id that one of its attempts may have."""
    return _ATTEMPTS.sub("", request_id[:ID_CHARACTERS_MAX])


SHOWN_MAX: Final = 64
"""Of either kind."""
LOOKED_AT_MAX: Final = 4096
"""Traces that one view looks through, the newest first."""


class RequestView(msgspec.Struct, kw_only=True):
    """One request. Times are seconds since the Unix epoch, by this machine."""

    id: str
    """Inside the cluster; `Traces.find` takes it."""
    start: float
    end: float | None = None
    outcome: str = ""
    """Empty while it is under way, else the code of an error or of another end."""
    model: str = ""
    """Or why there is none by the name that was asked for."""
    endpoint: str = ""
    instance: str = ""
    """Of the worker that was asked last."""
    leg: str = ""
    """What is done for it now, or was done last."""
    attempts: int = 0
    process: str = ""
    """Who told of it, where several are asked."""


class RequestsView(msgspec.Struct, kw_only=True):
    """Of one process, the newest first."""

    under_way: list[RequestView] = []
    failed: list[RequestView] = []
    under_way_left_out: int = 0
    requests_max: int = 0
    """How many requests are kept; 0: none are."""


def view_requests(traces: Traces) -> RequestsView:
    """The requests under way and those that failed last, as far as their traces are kept."""
    offset_s = traces.offset_s
    view = RequestsView(requests_max=traces.requests_max)
    for trace in islice(traces.newest_first(), LOOKED_AT_MAX):
        if not trace.legs or trace.is_good:
            continue
        if trace.legs[0].end is not None:
            if len(view.failed) < SHOWN_MAX:
                view.failed.append(_view(trace, offset_s))
        elif len(view.under_way) < SHOWN_MAX:
            view.under_way.append(_view(trace, offset_s))
        else:
            view.under_way_left_out += 1
    return view


def _view(trace: RequestTrace, offset_s: float) -> RequestView:
    root = trace.legs[0]
    now = next((leg for leg in reversed(trace.legs) if leg.end is None), trace.legs[-1])
    attempts = [leg for leg in trace.legs if leg.name == "attempt"]
    instance = attempts[-1].facts.get("instance", "") if attempts else ""
    return RequestView(
        id=root_of(trace.request_id),
        start=root.start + offset_s,
        end=None if root.end is None else root.end + offset_s,
        outcome=str(root.facts.get("outcome", "")),
        model=str(root.facts.get("model") or root.facts.get("why", "")),
        endpoint=str(root.facts.get("endpoint", "")),
        instance=str(instance),
        leg=now.name,
        attempts=len(attempts),
    )
