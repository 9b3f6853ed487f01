"""Tests over a simulated backend run in its world, those in memory on virtual time, all others as pytest-trio runs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conformance.control.backends import run_on_virtual_clock
from tests.worlds import run_in_world

HERE = Path(__file__).parent
IN_MEMORY = (HERE / "control", HERE / "events")
"""Folders whose backends `memory` and `signed` open no socket."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # It is called with the tests of all folders, and others may have a parameter of this name.
    ours = (item for item in items if str(item.path).startswith(f"{HERE}{os.sep}"))
    for item in ours:
        parameters = _parameters(item) if isinstance(item, pytest.Function) else []
        # In front of the marker that pytest-trio gives to every async test.
        if "simulated" in parameters:
            item.add_marker(pytest.mark.trio(run=run_in_world), append=False)
        elif item.path.parent in IN_MEMORY and ("memory" in parameters or "signed" in parameters):
            item.add_marker(pytest.mark.trio(run=run_on_virtual_clock), append=False)


def _parameters(item: pytest.Function) -> list[object]:
    return list(item.callspec.params.values()) if hasattr(item, "callspec") else []
