"""How a plane is doing, in numbers: what `/metrics` shows of outages.

A plane that keeps these counts has a method `statistics()`; one that does not is simply not shown.
Counts only grow, and reading them costs nothing, so a scrape may do it at any time, also after the
plane was closed.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import attrs


@attrs.frozen
class ControlStatistics:
    """What a control plane has met so far."""

    is_connected: bool
    """Whether the last thing heard of the store was an answer; False before the first one."""
    watches: int
    """Watches open now."""
    stream_losses: int
    """How often a stream to the store ended unasked, with watches or leases on it."""
    resyncs: int
    """How often a watch had to read everything again because history was gone."""
    silence_s: float = 0.0
    """Seconds since the store last answered; a quiet store is asked every few seconds."""


@attrs.frozen
class EventStatistics:
    """What an event plane has met so far."""

    is_connected: bool
    connections: int
    """How many connections were made; one more than the number of reconnections."""
    waiting_messages: int
    """Messages that wait to be sent now."""
    dropped_outgoing: int
    """Messages that could not be sent because a bound was reached or the plane was closed."""
    dropped_incoming: int
    """Messages that found a subscription full, over all subscriptions there ever were."""
    refused_incoming: int = 0
    """Requests, answers, jobs and events that no member had sealed so, or that came again."""


@runtime_checkable
class CountsControl(Protocol):
    """A control plane that counts."""

    def statistics(self) -> ControlStatistics:
        """The counts as of now; synchronous, never fails."""
        ...


@runtime_checkable
class CountsEvents(Protocol):
    """An event plane that counts."""

    def statistics(self) -> EventStatistics:
        """The counts as of now; synchronous, never fails."""
        ...
