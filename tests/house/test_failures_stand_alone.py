"""A test that fails leaves nothing open that makes another fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

SPILLS = """
import gc
import socket

import pytest
import trio


async def test_spills() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    stream = await trio.open_tcp_stream(*listener.socket.getsockname())
    cycle = [stream]
    cycle.append(cycle)
    raise AssertionError("as planned")


@pytest.fixture
def given():
    kept = socket.socket()
    yield kept
    raise AssertionError("as planned, too")


def test_spills_at_its_end(given) -> None: ...


def test_is_not_to_blame() -> None:
    gc.collect()
"""


@pytest.mark.slow
def test_what_a_failed_test_leaves_open_fails_no_other(tmp_path: Path) -> None:
    (tmp_path / "test_spills.py").write_text(SPILLS)
    (tmp_path / "conftest.py").write_text(
        "from tests.session.reports import pytest_runtest_makereport  # noqa: F401\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-c", ROOT / "pyproject.toml", f"--rootdir={tmp_path}", tmp_path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 2 passed, 1 error" in done.stdout, done.stdout[-3000:]
