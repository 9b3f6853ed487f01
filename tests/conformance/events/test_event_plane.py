"""Every event plane of ours, held to what each must do: in memory, simulated, and on real servers."""

from __future__ import annotations

from functools import partial

import pytest

from tests.transports.nats.brokers import Broker
from trinamo.conformance import EventPlaneConformance, WorkQueueConformance
from trinamo.conformance.events import OpenEvents

from .conftest import NATS


class TestEventPlane(EventPlaneConformance):
    """Over `open_plane` of each broker."""


class TestWorkQueue(WorkQueueConformance):
    """Over `open_plane` of each broker."""


@pytest.mark.parametrize("broker", ["simulated", NATS], indirect=True)
class TestSealedWorkQueue(WorkQueueConformance):
    """With a secret, where a broker is that others reach."""

    @pytest.fixture
    def open_plane(self, broker: Broker) -> OpenEvents:
        return partial(broker.connect, bytes(range(32)))
