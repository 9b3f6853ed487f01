"""When to renew a lease, and when to call it lost: a rule on numbers, no clock of its own."""

from __future__ import annotations

from typing import Final

import attrs

_WAIT_MIN_S: Final = 0.05
_RETRY_MAX_S: Final = 1.0


@attrs.define
class LeaseTimer:
    """The deadline of one lease as this side knows it.

    Renewals come at half of the *remaining* time, measured to the absolute deadline, so that a
    slow or failed renewal is followed by sooner ones and never by one that is too late. (A fixed
    ttl/2 period let a renewal just after a reconnect miss the deadline upstream.) The deadline
    moves only when the store has answered.
    """

    ttl_s: float
    deadline: float

    @classmethod
    def granted(cls, ttl_s: float, *, asked_at: float) -> LeaseTimer:
        """A lease granted with `ttl_s`. Counted from when we asked, the safe side."""
        return cls(ttl_s, asked_at + ttl_s)

    def renewed(self, remaining_s: float, *, asked_at: float) -> None:
        """The store says `remaining_s` are left as of some moment after `asked_at`."""
        self.deadline = max(self.deadline, asked_at + remaining_s)

    def wait_s(self, now: float) -> float:
        """How long to wait before the next renewal; at least 50 ms."""
        return max((self.deadline - now) / 2, _WAIT_MIN_S)

    def retry_s(self, now: float) -> float:
        """How long to wait after a renewal that got no answer; at most 1 s.

        Past the deadline hurrying saves nothing any more, and every worker of the cluster would
        hurry at once, against a store that is coming back.
        """
        return _RETRY_MAX_S if self.is_past(now) else min(self.wait_s(now), _RETRY_MAX_S)

    def is_past(self, now: float) -> bool:
        """Whether the deadline has passed. Not proof of loss: only the store knows."""
        return now >= self.deadline
