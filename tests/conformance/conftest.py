"""Tests over a simulated backend run in its world; all others as pytest-trio runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worlds import run_in_world

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # It is called with the tests of all folders, and others may have a parameter of this name.
    ours = (item for item in items if HERE in item.path.parents)
    for item in ours:
        if isinstance(item, pytest.Function) and "simulated" in _parameters(item):
            # In front of the marker that pytest-trio gives to every async test.
            item.add_marker(pytest.mark.trio(run=run_in_world), append=False)


def _parameters(item: pytest.Function) -> list[object]:
    return list(item.callspec.params.values()) if hasattr(item, "callspec") else []
