"""A child of `trinamo up` that crashes: what it died of is told."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cli.places import Place, cluster, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.services]

# Python runs it at its start, before anything else.
CRASHES_AT_A_SIGNAL = """
import signal

def crash(*_):
    error = MemoryError("no room for 4 GB")
    for _ in range(20):
        error = ExceptionGroup("unhandled errors in a nursery", [error])
    raise error

signal.signal(signal.SIGUSR1, crash)
"""


def test_the_cause_of_a_crash_is_told_and_the_child_started_again(tmp_path: Path) -> None:
    """Before: a traceback cut at ten groups, the cause below the cut."""
    (tmp_path / "sitecustomize.py").write_text(CRASHES_AT_A_SIGNAL)
    place = Place(tmp_path, {"PYTHONPATH": str(tmp_path)})
    with cluster(place, "--engine", "echo", "--workers", "1") as running:
        [worker] = [pid for pid, line in running.children.items() if " worker " in line]

        os.kill(worker, signal.SIGUSR1)

        wait_for(lambda: "worker-1 is back" in place.output, 60, "the worker's return")
        [ending] = [line for line in place.output.splitlines() if "starting it again" in line]
        assert "worker-1 exited with status 1" in ending
        assert "MemoryError: no room for 4 GB" in ending
