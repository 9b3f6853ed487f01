"""By when a request must be answered: what the client asks for, within what the operator allows."""

from __future__ import annotations

import math
from typing import Final

import trio

from ..errors import RequestError
from .exchanges import Headers, find_header

TIMEOUT_HEADER: Final = b"x-trinamo-timeout"
_TIMEOUT_MAX_S: Final = 86_400.0


def find_deadline(headers: Headers, answer_timeout_s: float | None) -> float:
    """When a request that arrives now must be over, on trio's clock; infinite if nobody says.

    The client's `X-Trinamo-Timeout`, in seconds, can only shorten `answer_timeout_s`
    (`http.answer_timeout_s`). Raises `RequestError` if it is no time of at most a day.
    """
    given = find_header(headers, TIMEOUT_HEADER)
    if given is None and answer_timeout_s is None:
        return math.inf
    wanted_s = math.inf if given is None else _parse(given)
    return trio.current_time() + min(wanted_s, answer_timeout_s or math.inf)


def _parse(given: bytes) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    # Written so that a NaN is refused too.
    if not 0 < seconds <= _TIMEOUT_MAX_S:
        raise RequestError(
            f"X-Trinamo-Timeout is {given[:40].decode('latin-1')!r}; it must be a number of seconds"
            f" above 0 and at most {_TIMEOUT_MAX_S:.0f}"
        )
    return seconds
