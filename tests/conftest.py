"""One real etcd and one real NATS server for each process of a test run.

They start on first use; the machinery is in `servers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import SessionEtcd, SessionNats, session_etcd, session_nats


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[SessionEtcd]:
    """A real etcd; `.endpoint` is its `host:port`. Shared: use a key prefix of your own."""
    with session_etcd() as server:
        yield server


@pytest.fixture(scope="session")
def nats_server() -> Iterator[SessionNats]:
    """A real nats-server with JetStream; `.url` is its `nats://host:port`. Shared as well."""
    with session_nats() as server:
        yield server
