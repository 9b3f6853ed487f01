"""`setup_log`: every line of the process on standard error, in one form, floods held back.

It is called once, by the front door. A line is formatted and handed to the stream at once, in the
task that logs it; the stream of a serving process never waits for its reader
(`trinamo/cli/serve/output.py`). Logging belongs at edges all the same, not in per-item loops.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import TextIO

from ..config.config import LogConfig
from .access import ACCESS_LOGGER, FAILED, OFF, AccessRecord
from .floods import FloodGate
from .formats import ConsoleFormat, JsonFormat
from .text import one_line


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
