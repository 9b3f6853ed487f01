"""The two forms of a line: for people, and one JSON object.

Both have the event (the sentence with its arguments), level, time, logger, then the fields of the
call's `extra`, of its scope and of the process. An error has its causes in the line itself and the
traceback after it: indented lines for people, a field in JSON.
"""

from __future__ import annotations

import json
import logging
import time
from functools import lru_cache
from typing import Any, Final

import msgspec

from .access import AccessRecord
from .fields import current_fields
from .text import cut, mask_text, masked, one_line, tell_causes, tell_traceback

_OWN: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})
"""What every record has; anything else came with `extra`."""
_COLORS: Final = {"warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m"}
_BOLD: Final = "\x1b[1m"
_DIM: Final = "\x1b[2m"
_PLAIN: Final = "\x1b[0m"
_TRACEBACK_INDENT: Final = "    "
_encode = msgspec.json.Encoder().encode


def _time(record: logging.LogRecord) -> str:
    return f"{_second(int(record.created))}.{int(record.msecs):03d}Z"


@lru_cache(maxsize=4)
def _second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def _event(record: logging.LogRecord) -> str:
    return mask_text(record.getMessage())


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    found = current_fields()
    found |= {key: value for key, value in vars(record).items() if key not in _OWN}
    if not found:
        return found
    shown: dict[str, Any] = masked(found)
    return shown


def _error(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if record.exc_info else None


class ConsoleFormat(logging.Formatter):
    """For people; `colors` for a terminal."""

    def __init__(self, *, colors: bool) -> None:
        super().__init__()
        self._colors = colors

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record, AccessRecord):
            return self._access(record)
        level = record.levelname.lower()
        parts = [
            self._in(_DIM, _time(record)),
            self._in(_COLORS.get(level, ""), f"[{level:<8}]"),
            self._in(_BOLD, one_line(_event(record))),
            self._in(_DIM, f"[{record.name}]"),
        ]
        parts += [f"{one_line(key)}={one_line(value)}" for key, value in _fields(record).items()]
        error = _error(record)
        if error is None:
            return " ".join(parts)
        parts.append(f"error={mask_text(tell_causes(error))}")
        traceback = mask_text(tell_traceback(error, indent=_TRACEBACK_INDENT))
        return f"{' '.join(parts)}\n{traceback}"

    def _access(self, record: AccessRecord) -> str:
        """As any other line, made at once: nothing in it is a secret, or has lines of its own."""
        shown = {**current_fields(), **record.fields}
        event = f"{shown.pop('method')} {shown.pop('path')} {shown.pop('status')}"
        fields = " ".join([f"{key}={value}" for key, value in shown.items()])
        head = self._in(_DIM, _time(record))
        return (
            f"{head} [{record.levelname.lower():<8}] {self._in(_BOLD, one_line(event))}"
            f" {self._in(_DIM, f'[{record.name}]')} {one_line(fields)}"
        )

    def _in(self, style: str, text: str) -> str:
        return f"{style}{text}{_PLAIN}" if self._colors and style else text


class JsonFormat(logging.Formatter):
    """One JSON object a line, for programs."""

    def format(self, record: logging.LogRecord) -> str:
        own = record.fields if isinstance(record, AccessRecord) else None
        line: dict[str, Any] = {
            **(_fields(record) if own is None else {**current_fields(), **own}),
            "event": cut(_event(record)) if own is None else record.getMessage(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "time": _time(record),
        }
        if own is not None:
            return one_line(_encode(line).decode(), characters_max=1 << 20)
        error = _error(record)
        if error is not None:
            line["error"] = mask_text(tell_causes(error))
            line["exception"] = mask_text(tell_traceback(error))
        # JSON escapes the controls of ASCII and leaves the others as they are.
        text = json.dumps(line, ensure_ascii=False, default=str, separators=(",", ":"))
        return one_line(text, characters_max=1 << 20)
