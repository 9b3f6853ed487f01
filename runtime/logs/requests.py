"""The one line about each request when it has ended, the same in a frontend and in a worker."""

from __future__ import annotations

import logging
from typing import Any, Final

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

    At `error`, with its traceback, if a `fault` of ours ended it. Whose request it was comes from the
    scope (`log_fields`).
    """
    level = logging.DEBUG if is_success else logging.INFO if fault is None else logging.ERROR
    if not logger.isEnabledFor(level):
        return
    extra = {**fields, "outcome": outcome, "duration_s": round(duration_s, 4)}
    if detail and fault is None:
        extra["error"] = detail
    logger.log(level, _SENTENCE, extra=extra, exc_info=fault)
