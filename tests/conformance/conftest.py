"""Tests over a simulated backend run in its world; all others as pytest-trio runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.control.backends import on_fitting_clock
from tests.worlds import run_in_world

HERE = Path(__file__).parent
# Tests of the suites that every transport is held to, which know nothing of our marks: those that take
# more than a quarter of a second, and those that wait, which need no time where time is virtual.
SLOW = frozenset(
    {
        "test_keys_die_with_an_expired_lease_and_live_while_it_is_kept",
        "test_a_reader_that_is_slow_loses_nothing_and_holds_up_nobody",
        "test_an_id_is_forgotten_after_the_window_but_not_while_it_is_queued",
        "test_an_expired_job_is_taken_again_and_the_late_ack_is_stale",
        "test_the_fence_holds_between_processes",
        "test_a_lease_that_is_extended_does_not_expire",
        "test_a_naked_job_waits_for_its_delay",
        "test_a_job_whose_takers_all_vanish_is_a_dead_letter",
    }
)
WAITING = "test_keys_die_with_an_expired_lease_and_live_while_it_is_kept"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # It is called with the tests of all folders, and others may have a parameter of this name.
    ours = (item for item in items if HERE in item.path.parents)
    for item in ours:
        name = getattr(item, "originalname", item.name)
        if name in SLOW:
            item.add_marker(pytest.mark.slow)
        if name == WAITING:
            item.add_marker(on_fitting_clock, append=False)
        if isinstance(item, pytest.Function) and "simulated" in _parameters(item):
            # In front of the marker that pytest-trio gives to every async test.
            item.add_marker(pytest.mark.trio(run=run_in_world), append=False)


def _parameters(item: pytest.Function) -> list[object]:
    return list(item.callspec.params.values()) if hasattr(item, "callspec") else []
