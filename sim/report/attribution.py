"""Which request a message belongs to, as far as a trace tells.

Segments carry no request. Where streams have a connection each, one that a worker opens is the way
home of one request: the latest the worker began and gave no connection yet. A segment to a worker that begins a request in
the same instant is that request's. What passes between a client and its frontend belongs to the
one request the client then has. Everything else (keep-alives, shared connections) belongs to none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from ..core.trace import Row


def host_name(label: str) -> str:
    """The host of a row without its incarnation: `worker0` for `worker0.2`."""
    name, dot, generation = label.rpartition(".")
    return name if dot and generation.isdigit() else label


def request_of(row: Row) -> str:
    """The request a note speaks of; empty if none. An attempt's name begins with its request's."""
    fields = dict(row.fields)
    value = fields.get("request", fields.get("id", ""))
    if isinstance(value, str) and value:
        return value.partition("-")[0]
    job = fields.get("job")
    return f"job {job}" if isinstance(job, (int, str)) else ""


class Attribution:
    """Learns from all rows of a run once, then answers `of_segment`."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._spans: dict[str, tuple[list[float], list[str]]] = {}
        """By client: times at which its request changes, and to which."""
        self._homes: dict[int, str] = {}
        self._begins: dict[tuple[str, float], list[str]] = {}
        waiting: dict[str, list[str]] = {}
        is_shared = False
        for row in rows:
            host = host_name(row.host)
            if row.kind in ("request.begin", "request.end"):
                times, names = self._spans.setdefault(host, ([], []))
                times.append(row.time_s)
                names.append(request_of(row) if row.kind == "request.begin" else "")
            elif row.kind == "worker.begin":
                waiting.setdefault(host, []).append(request_of(row))
                self._begins.setdefault((host, row.time_s), []).append(request_of(row))
            elif row.kind == "load.begin":
                is_shared = dict(row.fields).get("streams") == "multiplexed"
            elif row.kind == "connect":
                source = str(row.field("source"))
                if waiting.get(source) and not is_shared:
                    self._homes[int(row.field("connection"))] = waiting[source].pop()

    def of_segment(self, connection: int, source: str, target: str, land_s: float) -> str:
        """The request of a segment that landed then; empty if none is known."""
        if connection in self._homes:
            return self._homes[connection]
        for host in (source, target):
            if host in self._spans:
                return self._at(host, land_s)
        begun = self._begins.get((target, land_s), [])
        return begun[0] if begun else ""

    def _at(self, client: str, time_s: float) -> str:
        times, names = self._spans[client]
        index = bisect_right(times, time_s) - 1
        # A FIN that follows the end of a request is still that request's, for the eye.
        return names[index] if index >= 0 else ""
