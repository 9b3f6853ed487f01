"""The thread limit, and that it can be set before numpy is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinamo.runtime.engines.threads import THREAD_VARIABLES, core_count, limit_threads

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


@pytest.mark.slow
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
    assert core_count(tmp_path / "cpu.max") == expected
    assert core_count(tmp_path / "none") == scheduled
