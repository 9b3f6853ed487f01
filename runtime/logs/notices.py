"""Lines of a form that several parts write: notices, lines about instances, lines about requests.

A notice is about the same thing again and again: a peer that sends nonsense, or a server that is
away, is worth a line, but not hundreds a second; the log gets the first, and then how many
followed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable
from typing import Any, Final

import trio

from ..protocol.discovery.instances import Instance

_INTERVAL_S: Final = 5.0
_KINDS_MAX: Final = 64


class Throttle:
    """A line of each kind in so many seconds; the others are counted.

    A kind is a constant of the code: of more than 64 the oldest is forgotten.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._kinds: dict[Hashable, tuple[float, int]] = {}
        """When the next line of each may be written, and how many were not since the last."""

    def admit(self, kind: Hashable, now: float) -> int | None:
        """How many were held back before a line that may be written; None if this one is, too."""
        next_at, held_back = self._kinds.get(kind, (-math.inf, 0))
        if now < next_at:
            self._kinds[kind] = next_at, held_back + 1
            return None
        if kind not in self._kinds and len(self._kinds) >= _KINDS_MAX:
            del self._kinds[next(iter(self._kinds))]
        self._kinds[kind] = now + self._interval_s, 0
        return held_back


class LogNotices:
    """Rate-limited lines on one logger, counted by kind."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger, self._throttle = logger, Throttle(_INTERVAL_S)

    def warn(self, kind: str, detail: object) -> None:
        """Log `kind: detail`, unless that kind was logged less than the interval ago."""
        self.log(logging.WARNING, kind, detail)

    def log(self, level: int, kind: str, detail: object) -> None:
        count = self._throttle.admit(kind, trio.current_time())
        if count is not None:
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
