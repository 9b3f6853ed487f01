"""Fixtures every test may use: one real etcd and one real NATS server per session.

They start on first use. Tests that take them are marked `services`; the machinery is in
`servers.py`. What was skipped, and what would bring it, is said at the end: see `session`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.servers import SessionEtcd, SessionNats, session_etcd, session_nats
from tests.session import cpu, hypothesis_profile, lanes
from tests.session.cpu import pytest_addoption
from tests.session.lanes import (
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_ignore_collect,
    pytest_xdist_make_scheduler,
)
from tests.session.limits import (
    pytest_runtest_call,
    pytest_runtest_setup,
    pytest_runtest_teardown,
)
from tests.session.needs import pytest_terminal_summary
from tests.session.reports import pytest_runtest_makereport

__all__ = [
    "etcd_server",
    "nats_server",
    "pytest_addoption",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_ignore_collect",
    "pytest_runtest_call",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
    "pytest_runtest_teardown",
    "pytest_terminal_summary",
    "pytest_xdist_make_scheduler",
]

hypothesis_profile.load()
for name in ("COLUMNS", "LINES"):
    # Processes that share the tests are told a width, which commands would take for a person's.
    os.environ.pop(name, None)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    lanes.pytest_configure(config)
    cpu.pytest_configure(config)


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[SessionEtcd]:
    """A real etcd; `.endpoint` is its `host:port`. Shared: use a key prefix of your own."""
    with session_etcd() as server:
        yield server


@pytest.fixture(scope="session")
def nats_server() -> Iterator[SessionNats]:
    """A real nats-server with JetStream; `.url` is its `nats://host:port`. Shared likewise."""
    with session_nats() as server:
        yield server
