"""The thread limit, and that it can be set before numpy is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinamo.runtime.engines.threads import (
    THREAD_VARIABLES,
    Cores,
    busy_cores,
    count_cores,
    limit_threads,
    threads_of_step,
)

SCRIPT = """
import sys
from pathlib import Path
import trinamo.runtime.engines as engines
assert "numpy" not in sys.modules, "numpy was imported too early"
assert "cyllama" not in sys.modules
assert engines.limit_threads(1)
import numpy
assert not engines.limit_threads(1)
"""


def test_every_library_is_limited_but_the_operator_has_the_last_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in THREAD_VARIABLES:
        monkeypatch.setenv(name, "?")
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    limit_threads(2)
    found = {name: os.environ[name] for name in THREAD_VARIABLES}
    assert found == dict.fromkeys(THREAD_VARIABLES, "2") | {"OMP_NUM_THREADS": "7"}


def test_no_thread_is_too_few() -> None:
    with pytest.raises(ValueError, match="at least one"):
        limit_threads(0)


def test_the_engines_package_imports_neither_numpy_nor_an_extra() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("quota", "bound"),
    [("max 100000", None), ("150000 100000", 1), ("900000 100000", 9), ("", None)],
)
def test_cores_are_those_that_the_container_pays_for(
    tmp_path: Path, quota: str, bound: int | None
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    scheduled = len(os.sched_getaffinity(0))
    expected = scheduled if bound is None else min(scheduled, bound)
    assert count_cores(tmp_path / "cpu.max").usable == expected
    assert count_cores(tmp_path / "none").usable == scheduled


@pytest.mark.parametrize(
    ("scheduled", "granted", "busy", "sharing", "threads"),
    [
        (2, 2, 0.0, 1, 2),
        (2, 2, 0.3, 1, 2),  # A desktop's own noise.
        (2, 2, 0.8, 1, 1),
        (2, 2, 1.0, 1, 1),
        (2, 2, 2.0, 1, 1),  # One is the least.
        (1, 1, 0.0, 1, 1),
        (8, 8, 1.0, 1, 7),
        (8, 8, 3.9, 2, 2),
        (8, 8, 0.0, 3, 2),
        (64, 4, 30.0, 1, 4),  # A container's quota is its own, whatever others of the host do.
        (64, 4, 62.0, 1, 2),
        (64, 0, 0.0, 1, 1),  # Half a core's quota.
        (2, 2, 0.0, 0, 2),
    ],
)
def test_a_step_has_as_many_threads_as_cores_are_free(
    scheduled: int, granted: int, busy: float, sharing: int, threads: int
) -> None:
    assert threads_of_step(Cores(scheduled, granted), busy=busy, sharing=sharing) == threads


def test_busy_cores_are_read_from_what_was_not_idle_between_two_looks(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    scheduled = sorted(os.sched_getaffinity(0))
    own, foreign = scheduled[0], scheduled[-1] + 1

    def write(idle: int, used: int) -> None:
        rows = [(own, used, idle), (foreign, 10 * used, idle)]
        lines = [f"cpu{number} {user} 5 7 {rest} 3 0 1 2 9 9" for number, user, rest in rows]
        stat.write_text("\n".join(["cpu 1 2 3 4 5 6 7 8", *lines, "intr 5", ""]))

    write(idle=100, used=50)
    assert busy_cores(stat, lambda _: write(idle=110, used=80)) == pytest.approx(0.75)
    assert busy_cores(stat, lambda _: None) == 0, "no tick has passed"
    assert busy_cores(tmp_path / "none", lambda _: None) == 0
