"""Lines of a form that several parts write: notices, lines about instances, lines about requests.

A notice is about the same thing again and again: a peer that sends nonsense, or a server that is
away, is worth a line, but not hundreds a second; the log gets the first, and then how many
followed.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import trio

from ..protocol.discovery.instances import Instance

_INTERVAL_S: Final = 5.0
_KINDS_MAX: Final = 64


class LogNotices:
    """Rate-limited lines on one logger, counted by kind.

    A kind is a constant of the code: of more than 64 the oldest is forgotten.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._next: dict[str, float] = {}
        self._held_back: dict[str, int] = {}

    def warn(self, kind: str, detail: object) -> None:
        """Log `kind: detail`, unless that kind was logged less than the interval ago."""
        self.log(logging.WARNING, kind, detail)

    def log(self, level: int, kind: str, detail: object) -> None:
        """The same at another level."""
        now = trio.current_time()
        if now < self._next.get(kind, now):
            self._held_back[kind] = self._held_back.get(kind, 0) + 1
            return
        if kind not in self._next and len(self._next) >= _KINDS_MAX:
            oldest = next(iter(self._next))
            del self._next[oldest]
            self._held_back.pop(oldest, None)
        self._next[kind] = now + _INTERVAL_S
        count = self._held_back.pop(kind, 0)
        more = f" ({count} more since the last line)" if count else ""
        self._logger.log(level, "%s: %s%s", kind, detail, more)


class InstanceLog:
    """The texts begin with the instance's id and the endpoint, `instance %s of %s …`."""

    def __init__(self, logger: logging.Logger, endpoint: object) -> None:
        self._logger = logger
        self._endpoint = endpoint

    def info(self, text: str, instance: Instance, *more: object) -> None:
        """A line at `info`; `more` are the text's further arguments."""
        self._log(logging.INFO, text, instance, more)

    def warning(self, text: str, instance: Instance, *more: object) -> None:
        """A line at `warning`."""
        self._log(logging.WARNING, text, instance, more)

    def _log(self, level: int, text: str, instance: Instance, more: tuple[object, ...]) -> None:
        fields = {"instance_id": instance.id}
        self._logger.log(level, text, instance.id, self._endpoint, *more, extra=fields)


_SENTENCE: Final = "request ended"


def log_request(
    logger: logging.Logger,
    outcome: str,
    *,
    is_success: bool,
    duration_s: float,
    detail: str = "",
    fault: BaseException | None = None,
    **fields: Any,
) -> None:
    """At `debug` if the whole answer was given, else at `info`, with `detail` as its error.

    At `error`, with its traceback, if a `fault` of ours ended it. Whose request it was comes from
    the scope (`log_fields`).
    """
    level = logging.DEBUG if is_success else logging.INFO if fault is None else logging.ERROR
    if not logger.isEnabledFor(level):
        return
    extra = {**fields, "outcome": outcome, "duration_s": round(duration_s, 4)}
    if detail and fault is None:
        extra["error"] = detail
    logger.log(level, _SENTENCE, extra=extra, exc_info=fault)
