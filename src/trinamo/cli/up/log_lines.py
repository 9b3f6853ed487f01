"""The log of `trinamo up` itself, such as a server that is started again, through its display.

A handler that wrote to standard error would tear the live table apart.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from trinamo.runtime.config.config import LogConfig
from trinamo.runtime.logs.text import tell_causes

from .display import Display


class _DisplayHandler(logging.Handler):
    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        cause = "" if error is None else f": {tell_causes(error)}"
        self._display.line("up", f"{record.getMessage()}{cause}")


@contextmanager
def show_log(display: Display, config: LogConfig) -> Iterator[None]:
    """Send this process's log events to the display while inside."""
    root = logging.getLogger()
    handler = _DisplayHandler(display)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.getLevelNamesMapping()[config.level.upper()])
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
