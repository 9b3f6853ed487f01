"""Every control plane of ours, held to what each must do: in memory, simulated, and on real servers."""

from __future__ import annotations

from trinamo.conformance import ControlPlaneConformance


class TestControlPlane(ControlPlaneConformance):
    """Over `open_plane` of each backend."""
