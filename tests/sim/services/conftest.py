"""Tests that ask for `simulated` run in its world."""

from __future__ import annotations

import pytest

from tests.worlds import run_in_world


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and "simulated" in item.fixturenames:
            # In front of the marker that pytest-trio gives to every async test.
            item.add_marker(pytest.mark.trio(run=run_in_world), append=False)
