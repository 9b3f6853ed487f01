"""Fixtures that the suites in this folder share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.conformance.control.backends import Backend, MemoryBackend, SignedBackend
from tests.conformance.control.etcd_members import SYSTEM_ETCD, EtcdBackend
from tests.conformance.simulated import SimulatedEtcdBackend
from tests.servers import session_etcd
from tests.session import needs
from tests.worlds import in_world
from trinamo.conformance.control import OpenControl
from trinamo.runtime.protocol.discovery.instances import INSTANCE_PREFIX

_numbers = itertools.count(1)


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
        pytest.param("etcd", marks=pytest.mark.services),
        pytest.param("system-etcd", marks=pytest.mark.services),
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
    """Where this test's keys are, in a store that others use too; below what is signed where that is tested."""
    signed = INSTANCE_PREFIX if isinstance(backend, SignedBackend) else ""
    return f"{signed}test-{next(_numbers)}/"
