"""Every event plane of ours, held to what each must do: in memory, simulated, and on real servers."""

from __future__ import annotations

from trinamo.conformance import EventPlaneConformance, WorkQueueConformance


class TestEventPlane(EventPlaneConformance):
    """Over `open_plane` of each broker."""


class TestWorkQueue(WorkQueueConformance):
    """Over `open_plane` of each broker."""
