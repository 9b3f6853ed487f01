"""Whether an instance that failed is asked again: a circuit breaker, decided on numbers alone.

It is closed until the instance fails. Then it is open: while others live, nobody asks the instance,
for a time that doubles with every failure after it. When that is over it is half open: one request at
a time, the probe, finds out. An answer takes back one failure, and closes it when none is left. No
clock and no I/O here.
"""

from __future__ import annotations

import math
from typing import Final

from ...errors import (
    ConnectError,
    DisconnectedError,
    RemoteProtocolError,
    TrinamoError,
    UpstreamError,
)
from .presence import InFlight

_FAULTS: Final = (ConnectError, DisconnectedError, RemoteProtocolError, UpstreamError)
_STRIKES_MAX: Final = 5
_GROWS_TO_S: Final = 60.0
"""An instance is not passed over longer than this, or than `router.inhibit_s` if that is more."""


class Breaker:
    """Of one instance.

    `errors_max` errors that it answers with, in a row, open it; whatever else it fails by, at once.
    """

    __slots__ = ("_errors", "_errors_max", "_is_nonsensical", "_probe", "_strikes", "until")

    def __init__(self, errors_max: int) -> None:
        self._errors_max = errors_max
        self._errors = 0
        self._strikes = 0
        """How often it failed after it had been waited for; fewer by one for each answer since."""
        self._probe: InFlight | None = None
        self._is_nonsensical = False
        self.until = -math.inf
        """It is open until then."""

    @property
    def faulty_until(self) -> float:
        """Until when the instance is passed over; infinite while a probe is under way."""
        return math.inf if self._probe is not None else self.until

    def fail(self, error: TrinamoError, now: float, lasts_s: float) -> bool:
        """A request ended with `error`; whether the breaker is open for that, `lasts_s` or longer.

        An `UpstreamError` is an answer of one that lives: it counts with others in a row. Nonsense is
        not made good by a new connection. Errors that are no fault of the instance say nothing.
        """
        if not isinstance(error, _FAULTS):
            return False
        self._errors += 1
        is_answer = isinstance(error, UpstreamError)
        if is_answer and not self._strikes and self._errors < self._errors_max:
            return False
        if now >= self.until:
            # Not for every request that one failure took along.
            self._strikes = min(self._strikes + 1, _STRIKES_MAX)
        grown_s = min(lasts_s * 2 ** (self._strikes - 1), max(_GROWS_TO_S, lasts_s))
        self.until = max(self.until, now + grown_s)
        self._probe = None
        self._is_nonsensical |= isinstance(error, RemoteProtocolError)
        return True

    def answer(self) -> None:
        """The instance answered a request."""
        self._errors = 0
        if self._strikes:
            self._strikes -= 1
            self._probe, self._is_nonsensical, self.until = None, False, -math.inf

    def begin(self, request: InFlight) -> bool:
        """`request` is sent to the instance; whether others wait for what becomes of it."""
        if not self._strikes or self._probe is not None:
            return False
        self._probe = request
        return True

    def end(self, request: InFlight) -> None:
        """`request` is over, whatever became of it."""
        if self._probe is request:
            self._probe = None

    def connect(self) -> None:
        """A connection to the instance was made anew: it is another process, or was out of reach."""
        if not self._is_nonsensical:
            self.reset()

    def reset(self) -> None:
        """What it did wrong is over."""
        self._errors = self._strikes = 0
        self._probe, self._is_nonsensical, self.until = None, False, -math.inf
