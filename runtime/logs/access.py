"""One line about each HTTP request, on the logger `trinamo.access`, when its answer has ended.

`log.access` says which: all, those that failed, none; questions of monitors (`/health`,
`/metrics`), and the looks of a frontend whose upstream this is, leave a line at `debug` only. A
line is a usual record for whoever reads records, made in a fraction of a usual one's time: a
frontend writes thousands a second. They are not held back as a flood is, for each costs its client
a whole request; a reader that is too slow loses lines as with any other
(`trinamo_log_lines_lost_total`); but those without a key of ours, and what the listener itself
refuses, cost nobody anything, and are one line a second of a kind with a count. Who asked, who
answered and which model come from the scope (`fields.py`).
"""

from __future__ import annotations

import logging
from typing import Any, Final

from ..env import Clock
from .notices import Throttle
from .text import cut, mask_text

ACCESS_LOGGER: Final = "trinamo.access"
STRANGER: Final = "invalid_api_key"
"""The outcome of requests without a key of ours."""
LOOK_AGENT: Final = "trinamo-look"
"""The user agent of a frontend that looks after its upstreams, every two seconds."""
FAILED: Final = logging.INFO + 1
"""The number of a failure's level, so that the logger's own can leave out successes only."""
OFF: Final = logging.CRITICAL + 1
_PATH_CHARACTERS_MAX: Final = 200
_ERROR_CHARACTERS_MAX: Final = 500
_NAMES: Final = {logging.DEBUG: "DEBUG", logging.INFO: "INFO", FAILED: "INFO"}
_TEMPLATE: Final = {
    **vars(logging.makeLogRecord({})),
    "name": ACCESS_LOGGER,
    "msg": "%s %s %s",
    "module": "access",
}


class AccessRecord(logging.LogRecord):
    """A record whose `fields` are all that its call would have had as `extra`."""

    __slots__ = ("fields",)

    def __init__(self, level: int, created_s: float, fields: dict[str, Any]) -> None:
        # Not `super().__init__()`, which looks for the caller, the thread and the process.
        self.fields = fields
        own = self.__dict__
        own.update(_TEMPLATE)
        own.update(fields)
        own["levelno"], own["levelname"] = level, _NAMES[level]
        own["created"], own["msecs"] = created_s, created_s % 1 * 1e3
        own["args"] = (fields["method"], fields["path"], fields["status"])


class AccessLog:
    """Writes the lines of one service."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.now = clock, clock.now
        self._log = logging.getLogger(ACCESS_LOGGER)
        self._cheap = Throttle(1.0)

    def tell(
        self,
        method: bytes | str,
        path: bytes | str,
        status: int,
        outcome: str,
        *,
        began_at: float,
        is_success: bool,
        is_probe: bool = False,
        is_cheap: bool = False,
        error: str = "",
        first_token_s: float | None = None,
        **fields: int | None,
    ) -> None:
        """A request that came at `began_at`, of the clock's `now`, is over.

        `fields` are what else the line shows, such as tokens; what is not known is None, and left out. Costs
        nothing worth counting where no line is written.
        """
        level = logging.DEBUG if is_probe else logging.INFO if is_success else FAILED
        if not self._log.isEnabledFor(level):
            return
        if is_cheap or outcome == STRANGER:
            # Whoever is sent away may come as often as he likes: he costs a line a second.
            held_back = self._cheap.admit((status, outcome), self.now())
            if held_back is None:
                return
            if held_back:
                fields["held_back"] = held_back
        told = {
            "method": _text(method),
            "path": cut(_text(path), _PATH_CHARACTERS_MAX),
            "status": status,
            "outcome": outcome,
            **{name: value for name, value in fields.items() if value is not None},
        }
        if first_token_s is not None:
            told["first_token_s"] = round(first_token_s, 4)
        told["duration_s"] = round(self.now() - began_at, 4)
        if error:
            told["error"] = cut(mask_text(error), _ERROR_CHARACTERS_MAX)
        self._log.handle(AccessRecord(level, self._clock.wall(), told))


def _text(given: bytes | str) -> str:
    return given if isinstance(given, str) else given.decode("latin-1")
