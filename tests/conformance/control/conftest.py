"""Fixtures that the suites in this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import needs
from tests.conformance.control.backends import Backend, MemoryBackend, SignedBackend, prefix_on
from tests.conformance.control.etcd_members import SYSTEM_ETCD, EtcdBackend
from tests.conformance.simulated import SimulatedEtcdBackend
from tests.servers import session_etcd
from tests.worlds import in_world
from trinamo.conformance.control import OpenControl


@pytest.fixture(scope="session")
def system_etcd() -> Iterator[str]:
    """The endpoint of the distribution's own etcd, an older release, if it is installed."""
    if not SYSTEM_ETCD.exists():
        needs.SYSTEM_ETCD.lacking()
    with session_etcd(SYSTEM_ETCD) as server:
        yield server.endpoint


@pytest.fixture(
    params=[
        "memory",
        "signed",
        "simulated",
        "etcd",
        pytest.param("system-etcd", marks=pytest.mark.check),
    ]
)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The implementation under test."""
    if request.param == "memory":
        yield MemoryBackend()
    elif request.param == "signed":
        yield SignedBackend()
    elif request.param == "simulated":
        simulated = SimulatedEtcdBackend()
        with in_world(simulated.world):
            yield simulated
    elif request.param == "system-etcd":
        yield EtcdBackend(request.getfixturevalue("system_etcd"), binary=SYSTEM_ETCD)
    else:
        yield EtcdBackend(request.getfixturevalue("etcd_server").endpoint)


@pytest.fixture
def open_plane(backend: Backend) -> OpenControl:
    """The maker that the suite of every control plane takes."""
    return backend.open_plane


@pytest.fixture
def prefix(backend: Backend) -> str:
    """Prefix of this test's keys in a store that other tests use too."""
    return prefix_on(backend)
