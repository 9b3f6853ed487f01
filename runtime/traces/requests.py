"""What is under way in this process, and what failed last: the traces, each in a line."""

from __future__ import annotations

from itertools import islice
from typing import Final

import msgspec

from .ring import Traces, root_of
from .trace import Trace

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


def _view(trace: Trace, offset_s: float) -> RequestView:
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
