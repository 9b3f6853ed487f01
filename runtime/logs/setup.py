"""`setup_log`: every line of the process on standard error, in one form, floods held back.

It is called once, by the front door. A line is formatted and handed to the stream at once, in the
task that logs it; the stream of a serving process never waits for its reader
(`trinamo/cli/serve/output.py`). Logging belongs at edges all the same, not in per-item loops.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from contextlib import suppress
from typing import Final, TextIO

import attrs

from ..config.config import LogConfig
from .access import ACCESS_LOGGER, FAILED, OFF, AccessRecord
from .formats import ConsoleFormat, JsonFormat
from .text import one_line

# --- how many lines of one kind are written: a burst, then a few a second; the rest is counted ---

# A kind is a logger, a level and the constant sentence of a call, so that what a peer can cause as
# often as it likes (a bad frame, a refused connection, a failed request) costs a bounded number of
# lines, and the next line of the kind, or a line of its own later, tells how many were held back. A
# second bound holds for all kinds together. Lines at `debug` are never held back: who asks for them
# wants them all.

BURST_LINES: Final = 50
LINES_PER_S: Final = 2.0
ALL_BURST_LINES: Final = 500
ALL_LINES_PER_S: Final = 50.0
TRACEBACK_COST: Final = 10.0
"""A line with a traceback counts as so many."""
KINDS_MAX: Final = 256
TELL_AFTER_S: Final = 5.0
"""A kind that has held back and comes no more is told of after this time, with the next line."""

_Kind = tuple[str, int, str]


@attrs.define
class _Bucket:
    lines_max: float
    lines_per_s: float
    at_s: float
    room: float
    held_back: int = 0

    def take(self, now_s: float, cost: float) -> bool:
        # A clock that was set back must not close the gate until it has caught up.
        grown = max(0.0, now_s - self.at_s) * self.lines_per_s
        self.room = min(self.lines_max, self.room + grown)
        self.at_s = now_s
        if self.room < cost:
            return False
        self.room -= cost
        return True


class FloodGate:
    """Decides line by line; for one thread at a time. Time is that of the records."""

    def __init__(self) -> None:
        self.held_back = 0
        """Lines that were not written, ever."""
        self._kinds: OrderedDict[_Kind, _Bucket] = OrderedDict()
        self._all = _Bucket(ALL_BURST_LINES, ALL_LINES_PER_S, 0.0, ALL_BURST_LINES)
        self._look_at_s = 0.0

    def admit(self, record: logging.LogRecord) -> list[logging.LogRecord]:
        """What to write now: lines about what was held back, and `record` unless it is."""
        if record.levelno <= logging.DEBUG:
            return [record]
        now_s = record.created
        kind = record.name, record.levelno, str(record.msg)
        bucket = self._kinds.get(kind)
        if bucket is None:
            bucket = self._kinds[kind] = _Bucket(BURST_LINES, LINES_PER_S, now_s, BURST_LINES)
            if len(self._kinds) > KINDS_MAX:
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(kind)
        cost = TRACEBACK_COST if record.exc_info else 1.0
        if not (bucket.take(now_s, cost) and self._all.take(now_s, cost)):
            bucket.held_back += 1
            self.held_back += 1
            return []
        told = self._tell(now_s) if now_s >= self._look_at_s else []
        if bucket.held_back:
            vars(record)["held_back"] = bucket.held_back
            bucket.held_back = 0
        return [*told, record]

    def tell_all(self) -> list[logging.LogRecord]:
        return self._tell(float("inf"))

    def _tell(self, now_s: float) -> list[logging.LogRecord]:
        self._look_at_s = now_s + TELL_AFTER_S
        told = []
        for (name, level, sentence), bucket in self._kinds.items():
            if not bucket.held_back or now_s - bucket.at_s < TELL_AFTER_S:
                continue
            arguments = (bucket.held_back, sentence)
            bucket.held_back = 0
            told.append(
                logging.LogRecord(
                    name,
                    level,
                    __file__,
                    0,
                    "%d lines like this were held back: %s",
                    arguments,
                    None,
                )
            )
        return told


# --- writing ---


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes what the flood gate lets through."""

    def __init__(self, stream: TextIO, form: logging.Formatter) -> None:
        super().__init__(stream)
        self.gate = FloodGate()
        self.setFormatter(form)

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record, AccessRecord):
            try:
                # No flush: streams of ours and standard error write whole lines at once.
                self.stream.write(f"{self.format(record)}\n")
            except (OSError, ValueError):
                self.handleError(record)
            return
        for each in self.gate.admit(record):
            super().emit(each)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 -- logging's name
        """A line that cannot be written is told by its sentence, without its arguments.

        Where the stream takes none, be it full, closed or gone, it is lost: who logs is not to
        blame.
        """
        with suppress(OSError, ValueError):
            self.stream.write(f"{record.name}: cannot write a line: {one_line(record.msg)}\n")

    def close(self) -> None:
        for each in self.gate.tell_all():
            super().emit(each)
        super().close()


def setup_log(config: LogConfig, *, stream: TextIO | None = None) -> LogHandler:
    """Send every log line of the process to `stream` (standard error unless given).

    `format: auto` writes for people on a terminal and one JSON object a line elsewhere; colour is
    used only on a terminal. May be called again, then the last call wins.
    """
    target = sys.stderr if stream is None else stream
    is_terminal = target.isatty()
    as_json = config.format == "json" or (config.format == "auto" and not is_terminal)
    handler = LogHandler(target, JsonFormat() if as_json else ConsoleFormat(colors=is_terminal))
    root = logging.getLogger()
    for old in list(root.handlers):
        if isinstance(old, LogHandler):
            root.removeHandler(old)
    root.addHandler(handler)
    set_log_level(config.level, config.access)
    logging.captureWarnings(capture=True)
    return handler


def set_log_level(name: str, access: str) -> None:
    """Write our lines of the level `name` and above from now on, and access lines as `access` says.

    Of libraries only warnings and worse are written: what they say at `debug` may hold a header's
    value or a body, and no list of them is ever complete.
    """
    level = logging.getLevelNamesMapping()[name.upper()]
    logging.getLogger().setLevel(max(level, logging.WARNING))
    logging.getLogger("trinamo").setLevel(level)
    told = {"all": logging.NOTSET, "failures": FAILED}.get(access, OFF)
    logging.getLogger(ACCESS_LOGGER).setLevel(max(level, told))
