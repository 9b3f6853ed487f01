"""One record for each instance: presence, faults, connection, load, and requests under way.

`Instances` (`instances.py`) keeps the records, and says what becomes of them.
"""

from __future__ import annotations

import enum
import math

import trio

from ..events.load import REPORT_AGE_MAX_S, BusyLimits, LoadReport
from ..protocol.discovery.candidates import Standing
from ..protocol.discovery.instances import Instance
from ..protocol.discovery.presence import InFlight, InstanceFault, Liveness, Presence


class InstanceStatus(enum.StrEnum):
    """How an instance is seen now."""

    LIVE = "live"
    DRAINING = "draining"
    INHIBITED = "inhibited"
    """It failed a moment ago, or does not answer, and is passed over while another lives."""
    STALE = "stale"
    """Discovery has deleted it, but it is reached: it may only have lost its lease."""
    SUSPECTED = "connection lost"
    """Discovery names it, but no connection reaches it any more."""
    UNREACHED = "cannot be reached"
    """Discovery names it, but no connection has ever reached it where it is now."""
    FOREIGN = "no common transport"
    """It speaks none of the transports that are spoken here, so it is never chosen."""
    GONE = "gone"
    """It left without draining, less than `GONE_S` ago: it was killed, hangs, or lost its network."""


class InstanceRecord(Liveness):
    """All that is known of one instance."""

    def __init__(
        self,
        instance: Instance,
        number: int,
        grace_s: float,
        stale_grace_s: float,
        errors_max: int,
    ) -> None:
        super().__init__(grace_s, stale_grace_s, errors_max)
        self.instance = instance
        self.number = number
        """Greater than that of whoever joined before."""
        self.standing: Standing | None = None
        """Among those that may be chosen, as `Choices` has it."""
        self.faulty_end = -math.inf
        """The end of a fault that `Choices` waits for."""
        self.is_foreign = False
        self.is_connected = False
        self.connected_once: set[str] = set()
        """The transports over which it has been reached where it is now."""
        self.causes_told: set[str] = set()
        """What the log has said of why no connection to it can be made."""
        self.report: LoadReport | None = None
        """What it said last of its load."""
        self.reported_at = -math.inf
        self.lost_at = math.inf
        """Since when its connection has been lost."""
        self.is_leaving = False
        """It has said that it drains."""
        self.is_over = False
        """It has left and nothing is under way to it: its task ends."""
        self.moves = 0
        """How often it has registered under other addresses."""
        self._wakeup = trio.Event()
        self._sleeping: trio.CancelScope | None = None
        """While its task waits for news alone: what sets when it looks all the same."""

    @property
    def load(self) -> int:
        """The requests under way to it: ours, or what it said itself if that is more."""
        return max(len(self.requests), self.report.active if self.report else 0)

    def is_busy(self, limits: BusyLimits, now: float) -> bool:
        """Whether a report of the last seconds reaches `limits`, with what was sent to it since."""
        if self.report is None or now - self.reported_at > REPORT_AGE_MAX_S:
            return False
        sent = uncomputed = 0
        for request in reversed(self.requests):
            if request.sent_at < self.reported_at:
                break
            sent += request.payload_bytes
            if not request.has_items:
                uncomputed += request.payload_bytes
        return limits.is_busy(self.report, sent, uncomputed)

    @property
    def is_kept(self) -> bool:
        """Whether it stays if it is deleted now: as far as is known, it lost its lease only."""
        return self.is_connected and not self.instance.draining

    def status(self, now: float) -> InstanceStatus:
        """How it is seen; it has not left."""
        if self.is_foreign:
            return InstanceStatus.FOREIGN
        if InstanceFault.UNREACHED in self.faults:
            return InstanceStatus.SUSPECTED if self.connected_once else InstanceStatus.UNREACHED
        if self.instance.draining:
            return InstanceStatus.DRAINING
        if self.presence is Presence.STALE:
            return InstanceStatus.STALE
        return InstanceStatus.LIVE if self.faulty_until <= now else InstanceStatus.INHIBITED

    @property
    def is_reached(self) -> bool:
        """Whether a request to it would arrive and be taken, as far as is known."""
        is_out = self.instance.draining or self.is_foreign
        return not (
            is_out or self.faults.keys() & {InstanceFault.UNREACHED, InstanceFault.UNRESPONSIVE}
        )

    def begin(self, request: InFlight) -> bool:
        """See `Liveness`; its task looks at it in a quarter of a grace.

        It is not woken at once: most requests are over before it looks. The first look, which begins the
        grace, is made here in its place.
        """
        now = request.sent_at = trio.current_time()
        is_trial = super().begin(request)
        if self._sleeping is not None:
            self._sleeping.deadline, self._sleeping = now + self.pause_s, None
            self.look(now)
        return is_trial

    def wake(self) -> None:
        """There is news for its task."""
        self._wakeup.set()
        self._wakeup = trio.Event()
        self._sleeping = None

    async def wait_news(self, until: float) -> None:
        """Return at `until`, or once there is news; with `until` infinite also some time after a request."""
        with trio.move_on_at(until) as scope:
            self._sleeping = scope if until == math.inf else None
            await self._wakeup.wait()
