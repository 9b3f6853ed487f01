"""A child of `trinamo up` that hangs, and what the system's limits are for it."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.places import Place, cluster, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.services]


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def descriptor_limits(pid: int) -> list[str]:
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return next(line for line in lines if line.startswith("Max open files")).split()[3:5]


def test_up_tells_of_a_frontend_that_hangs_and_of_its_return(
    tmp_path: Path, few_descriptors: None
) -> None:
    """Before: not a word for as long as it was stopped."""
    with cluster(Place(tmp_path), "--engine", "echo", "--workers", "1") as running:
        output = running.place
        for pid, line in running.children.items():
            if " frontend " in line or " worker " in line:
                soft, hard = descriptor_limits(pid)
                assert int(soft) == min(int(hard), 1 << 20)
        [frontend] = [pid for pid, line in running.children.items() if " frontend " in line]

        os.kill(frontend, signal.SIGSTOP)
        told = f"frontend (pid {frontend}) runs, but does not answer"
        wait_for(lambda: told in output.output, 60, "the word about the frontend")
        os.kill(frontend, signal.SIGCONT)
        wait_for(lambda: "frontend answers again" in output.output, 60, "its return")

        assert output.output.count(told) == 1
