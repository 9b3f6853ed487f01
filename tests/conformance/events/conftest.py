"""Fixtures that the suites in this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.conformance.simulated import unreal_broker
from tests.transports.nats.brokers import (
    Broker,
    NatsServerUnderTest,
    private_server,
)
from trinamo.conformance.events import OpenEvents
from trinamo.transports.servers.binaries import find_nats_server

DEBIAN_SERVER = Path("/usr/sbin/nats-server")
NATS: Any = "nats"
DEBIAN: Any = pytest.param(
    "nats-debian",
    marks=[pytest.mark.check, needs.SYSTEM_NATS.unless(DEBIAN_SERVER.exists())],
)


@pytest.fixture(scope="module")
def debian_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with private_server(DEBIAN_SERVER, "-js", "-sd", str(tmp_path_factory.mktemp("js"))) as server:
        yield server.url


@pytest.fixture(params=["memory", "simulated", NATS, DEBIAN])
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A broker that others use too."""
    if request.param == "nats":
        yield NatsServerUnderTest(request.getfixturevalue("nats_server").url)
    elif request.param == "nats-debian":
        yield NatsServerUnderTest(request.getfixturevalue("debian_url"))
    else:
        yield from unreal_broker(request.param)


@pytest.fixture(params=["memory", "simulated", NATS])
def mortal_broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    """One that may be killed and started again at its address; what it has stored stays."""
    if request.param != "nats":
        yield from unreal_broker(request.param)
        return
    with private_server(find_nats_server(), "-js", "-sd", str(tmp_path)) as server:
        yield NatsServerUnderTest(server.url, server)


@pytest.fixture
def open_plane(broker: Broker) -> OpenEvents:
    """The maker that the suites of every event plane take."""
    return broker.connect
