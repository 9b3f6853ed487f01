"""Every control plane of ours, held to what each must do: in memory, simulated, and on real servers."""

from __future__ import annotations

import pytest

from tests.conformance.control.backends import Backend, SignedBackend, prefix_on
from trinamo.conformance import ControlPlaneConformance


class TestControlPlane(ControlPlaneConformance):
    """Over `open_plane` of each backend."""

    @pytest.fixture
    def prefix(self, backend: Backend) -> str:
        return prefix_on(backend)

    @pytest.fixture
    def value_bytes_max(self, backend: Backend) -> int:
        """A signature is part of the value that is stored, and takes less than 4 KiB of it."""
        return (1 << 20) - (4 << 10 if isinstance(backend, SignedBackend) else 0)
