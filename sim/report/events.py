"""From the rows of a trace to what a space-time diagram draws: hosts, messages, notes, bands.

Task steps are left out. Runs of one request's tokens on one host become one note with a count. If
there is more than `items_max` of messages and notes, the latest are kept, since a run ends where its
failure is; `omitted` says what is missing. Faults, lifelines and the end are always whole.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs

from ..core.host import DRIVER
from ..core.machines import FAULTS
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
    """Which request a segment belongs to. Learns from all rows of a run once, then answers `of_segment`.

    Segments carry no request. Where streams have a connection each, one that a worker opens is the way
    home of one request: the latest the worker began and gave no connection yet. A segment to a worker
    that begins a request in the same instant is that request's. What passes between a client and its
    frontend belongs to the one request the client then has. Everything else (keep-alives, shared
    connections) belongs to none.
    """

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


ITEMS_MAX = 12_000
TEXT_MAX = 300
LABEL_MAX = 60
TOKENS = ("engine.token", "stream.token")
ENDS = {"exit": "left", "kill": "killed", "power_off": "without power"}
VALUES_MAX = 1000
SERIES_MAX = 60
VALUELESS = frozenset({"boot", "fault", "disk", "resume", *ENDS, *FAULTS})
"""Kinds of rows whose numbers are no state that changes."""
OPERATIONS = ("operation", "operation.end")
UNDRAWN = ("block", "drawn")
"""Kinds of rows that are there for the digest alone."""
SILENT = (
    "step",
    "connect",
    "arrive",
    "held",
    "lost",
    "send",
    "deliver",
    "drop",
    "overflow",
    "heal",
)


@attrs.define
class DrawnMessage:
    """One segment or bus message; `land_s` is None if it never landed."""

    sent_s: float
    land_s: float | None
    source: str
    target: str
    kind: str
    text: str
    request: str
    fate: str = ""
    label: str = ""
    """A word or two for the arrow itself."""


@attrs.define
class Note:
    """Something that happened on one host."""

    time_s: float
    host: str
    kind: str
    text: str
    request: str
    count: int = 1
    last_s: float = 0.0
    row: int = -1
    """Which row of the trace it is."""


@attrs.define
class Band:
    """What was wrong with a host for a while."""

    host: str
    start_s: float
    end_s: float
    kind: str
    text: str


@attrs.define
class Events:
    """Everything the page knows of a run."""

    hosts: list[str] = attrs.field(factory=list)
    lives: list[tuple[str, float, float, int, str]] = attrs.field(factory=list)
    """Host, from, to, incarnation, how it ended."""
    bands: list[Band] = attrs.field(factory=list)
    messages: list[DrawnMessage] = attrs.field(factory=list)
    notes: list[Note] = attrs.field(factory=list)
    values: dict[tuple[str, str], list[tuple[float, float]]] = attrs.field(factory=dict)
    """What the numbers in notes were, over time: by host, and kind and name of the field."""
    end_s: float = 0.0
    step_count: int = 0
    omitted: str = ""

    @property
    def requests(self) -> list[str]:
        """Every request that was named, in the order of its first appearance."""
        return list(dict.fromkeys(note.request for note in self.notes if note.request))

    def latest(self, items_max: int) -> None:
        """Keep at most so many messages and notes, those at the end; say what went."""
        times = sorted(
            [message.sent_s for message in self.messages] + [note.time_s for note in self.notes]
        )
        if len(times) <= items_max:
            return
        start_s = times[-items_max]
        before = len(self.messages), len(self.notes)
        self.messages = [m for m in self.messages if m.sent_s >= start_s][-items_max:]
        kept = items_max - len(self.messages)
        self.notes = [n for n in self.notes if n.time_s >= start_s][-kept:] if kept > 0 else []
        self.omitted = (
            f"Left out to keep this page small: {before[0] - len(self.messages)} of {before[0]}"
            f" messages and {before[1] - len(self.notes)} of {before[1]} notes, those before"
            f" {start_s:.6f} s. Lifelines and faults are complete."
        )


def events_of(rows: Sequence[Row], *, end_s: float = 0.0, items_max: int = ITEMS_MAX) -> Events:
    """Read a whole trace. `end_s` is when the run ended, if later than its last row."""
    reader = _Reader(rows)
    for number, row in enumerate(rows):
        reader.take(row, number)
    return reader.finish(max([end_s, *(row.time_s for row in rows[-1:])]), items_max)


class _Reader:
    def __init__(self, rows: Sequence[Row]) -> None:
        self.events = Events()
        self._attribution = Attribution(rows)
        self._ends: dict[int, tuple[str, str]] = {}
        self._open: dict[tuple[Any, ...], DrawnMessage] = {}
        self._alive: dict[str, tuple[float, int]] = {}
        self._wrong: dict[tuple[str, str], float] = {}
        self._cuts: dict[str, dict[str, None]] = {}
        self._token_runs: dict[tuple[str, str, str], Note] = {}
        self._hosts: dict[str, None] = {}
        self._called: dict[int, tuple[float, str, str]] = {}

    def take(self, row: Row, number: int) -> None:
        if row.kind in UNDRAWN:
            return
        if row.kind == "step":
            self.events.step_count += 1
            return
        fields: dict[str, Any] = dict(row.fields)
        if row.kind in OPERATIONS:
            # What a checker was told of a client's call, or of its return: a bar beside the
            # lifeline.
            called = int(fields["called"])
            if row.kind == "operation":
                client = str(fields["client"])
                host = client if client in self._hosts else host_name(row.host)
                self._hosts[host] = None
                self._called[called] = row.time_s, host, f"{fields['text']}"[:LABEL_MAX]
            elif called in self._called:
                since_s, host, text = self._called.pop(called)
                text = f"{text} → {fields['text']}"[:TEXT_MAX]
                self.events.bands.append(Band(host, since_s, row.time_s, "operation", text))
            return
        if row.kind in SILENT and ("connection" in fields or "number" in fields):
            if "connection" in fields:
                self._segment(row, fields)
            else:
                self._bus(row, fields)
            return
        self._life(row, fields)
        if row.kind != "heal":
            self._note(row, number, fields)

    def finish(self, end_s: float, items_max: int) -> Events:
        events = self.events
        events.end_s = end_s
        for host, (since_s, generation) in self._alive.items():
            events.lives.append((host, since_s, end_s, generation, ""))
        for host in list(self._cuts):
            self._cut_changes(host, end_s)
        for (host, kind), since_s in self._wrong.items():
            events.bands.append(Band(host, since_s, end_s, kind, kind))
        for since_s, host, text in self._called.values():
            events.bands.append(Band(host, since_s, end_s, "operation", f"{text} → no return"))
        events.hosts = sorted(self._hosts, key=_rank)
        events.messages.sort(key=lambda message: message.sent_s)
        # One that stays the same says nothing over time.
        changing = [each for each in events.values.items() if len({v for _, v in each[1]}) > 1]
        events.values = dict(sorted(changing)[:SERIES_MAX])
        events.latest(items_max)
        return events

    # --- hosts -----------------------------------------------------------------------------

    def _life(self, row: Row, fields: dict[str, Any]) -> None:
        host, now_s = str(fields.get("host", "")), row.time_s
        if row.kind == "boot":
            self._hosts[host] = None
            self._alive[host] = (now_s, int(fields.get("generation", 1)))
            self._end_band(host, "down", now_s)
        elif row.kind in ENDS:
            since_s, generation = self._alive.pop(host, (now_s, 1))
            self.events.lives.append((host, since_s, now_s, generation, ENDS[row.kind]))
            self._end_band(host, "paused", now_s)
            if row.kind != "exit":
                self._wrong[host, "down"] = now_s
        elif row.kind == "pause":
            self._wrong[host, "paused"] = now_s
        elif row.kind == "resume":
            self._end_band(host, "paused", now_s)
        elif row.kind in ("cut", "heal"):
            self._cut(row, str(fields["source"]), str(fields["target"]))

    def _end_band(self, host: str, kind: str, now_s: float) -> None:
        since_s = self._wrong.pop((host, kind), None)
        if since_s is not None:
            self.events.bands.append(Band(host, since_s, now_s, kind, kind))

    def _cut(self, row: Row, a: str, b: str) -> None:
        for x in self._named(a):
            for y in self._named(b):
                if x != y:
                    for host, other in ((x, y), (y, x)):
                        partners = self._cuts.get(host, {})
                        if (row.kind == "cut") == (other in partners):
                            continue
                        self._cut_changes(host, row.time_s)
                        partners = dict(partners)
                        if row.kind == "cut":
                            partners[other] = None
                        else:
                            partners.pop(other)
                        self._cuts[host] = partners
                        self._wrong[host, "cut"] = row.time_s

    def _named(self, pattern: str) -> list[str]:
        """The hosts that a pattern of the network's faults means."""
        if "*" not in pattern and "?" not in pattern:
            return [pattern]
        return [host for host in self._hosts if fnmatchcase(host, pattern)]

    def _cut_changes(self, host: str, now_s: float) -> None:
        since_s = self._wrong.pop((host, "cut"), None)
        partners = list(self._cuts.get(host, ()))
        if since_s is None or not partners or since_s == now_s:
            return
        # Who is cut off from many is isolated; each of the many has lost one partner.
        kind = "cut" if len(partners) <= 2 else "isolated"
        names = ", ".join(partners) if len(partners) <= 2 else f"{len(partners)} hosts"
        self.events.bands.append(Band(host, since_s, now_s, kind, f"cut off from {names}"))

    # --- messages --------------------------------------------------------------------------

    def _segment(self, row: Row, fields: dict[str, Any]) -> None:
        connection, now_s = int(fields["connection"]), row.time_s
        if row.kind == "connect":
            source, target = str(fields["source"]), str(fields["target"])
            self._ends[connection] = source, target
            kind, text, key = "connect", f"connection {connection}", (connection, source, 0)
        else:
            source = str(fields.get("source", ""))
            a, b = self._ends.get(connection, (source, source))
            target = b if a == source else a
            kind = str(fields.get("segment", "data"))
            text = f"{kind} {fields.get('size', '')} bytes, connection {connection}"
            key = (connection, source, int(fields.get("number", 0)))
        message = self._open.pop(key, None)
        if message is None:
            request = self._attribution.of_segment(connection, source, target, now_s)
            sent_s = now_s if row.kind in ("held", "lost") else fields.get("sent_s", now_s)
            label = str(fields.get("label", ""))[:LABEL_MAX]
            message = DrawnMessage(sent_s, None, source, target, kind, text, request, label=label)
            self._add(message)
        if row.kind in ("arrive", "connect"):
            message.land_s = now_s
        else:
            message.fate = "held back by a cut" if row.kind == "held" else "lost"
            self._open[key] = message

    def _bus(self, row: Row, fields: dict[str, Any]) -> None:
        key = ("bus", fields.get("number"), fields.get("source"), fields.get("target"))
        if row.kind == "send":
            text = f"{fields.get('channel', '')} {fields.get('payload', '')}"[:TEXT_MAX]
            source, target = str(fields.get("source", "")), str(fields.get("target", ""))
            sent = DrawnMessage(row.time_s, None, source, target, "message", text, "")
            sent.label = str(fields.get("channel", ""))[:LABEL_MAX]
            self._open[key] = sent
            self._add(sent)
            return
        message = self._open.get(key)
        if message is None:
            return
        if row.kind == "deliver" and message.land_s is not None:
            message = attrs.evolve(message, fate="delivered again")
            self._add(message)
        if row.kind == "deliver":
            message.land_s = row.time_s
        else:
            message.fate = row.kind

    def _add(self, message: DrawnMessage) -> None:
        for host in (message.source, message.target):
            self._hosts[host] = None
        self.events.messages.append(message)

    # --- notes -----------------------------------------------------------------------------

    def _note(self, row: Row, number: int, fields: dict[str, Any]) -> None:
        host = str(fields["host"]) if "host" in fields else host_name(row.host)
        self._hosts[host] = None
        request = request_of(row)
        if row.kind in TOKENS:
            key = (host, row.kind, request)
            run = self._token_runs.get(key)
            if run is not None:
                run.count, run.last_s = run.count + 1, row.time_s
                return
        text = " ".join(f"{name}={value}" for name, value in fields.items())[:TEXT_MAX]
        note = Note(row.time_s, host, row.kind, text, request, 1, row.time_s, number)
        self.events.notes.append(note)
        for name, value in fields.items() if row.kind not in VALUELESS else ():
            if type(value) in (int, float) and math.isfinite(value):
                series = self.events.values.setdefault((host, f"{row.kind} {name}"), [])
                if len(series) < VALUES_MAX:
                    series.append((row.time_s, value))
        if row.kind in TOKENS:
            self._token_runs[host, row.kind, request] = note
        elif request:
            # What else happens to the request on this host ends the run of its tokens.
            for kind in TOKENS:
                self._token_runs.pop((host, kind, request), None)


def _rank(host: str) -> tuple[int, str, int, str]:
    """Driver first, then clients, frontends, workers, and what they share."""
    order = ("client", "frontend", "router", "worker", "byzantine", "queue", "store", "broker")
    stem = host.rstrip("0123456789")
    digits = host[len(stem) :]
    if host == DRIVER:
        return -1, "", 0, host
    place = order.index(stem) if stem in order else len(order)
    return place, stem, int(digits or 0) if len(digits) < 10 else 0, host
