"""A test that fails, or hangs, makes no other fail, and says where it was."""

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


HANGS = """
import contextlib

import trio


async def waits_for_nobody() -> None:
    await trio.Event().wait()


async def test_hangs() -> None:
    async with trio.open_nursery() as nursery:
        nursery.cancel_scope.shield = True
        nursery.start_soon(waits_for_nobody)
        with contextlib.suppress(Exception):
            await trio.sleep_forever()


def test_is_played_all_the_same() -> None: ...
"""


@pytest.mark.slow
def test_what_a_failed_test_leaves_open_fails_no_other(tmp_path: Path) -> None:
    said = play(tmp_path, SPILLS, "from tests.session.reports import pytest_runtest_makereport")
    assert "1 failed, 2 passed, 1 error" in said


@pytest.mark.slow
def test_one_that_hangs_fails_by_its_name_and_says_who_waits(tmp_path: Path) -> None:
    said = play(
        tmp_path,
        HANGS,
        "from tests.session import limits\n"
        "limits.LIMIT_S = 1\n"
        "from tests.session.limits import pytest_runtest_call",
    )
    assert "1 failed, 1 passed" in said
    assert "test_hangs runs for 1 s" in said
    assert f"waits_for_nobody: {tmp_path}/test_planned.py:8" in said


def play(folder: Path, tests: str, hooks: str) -> str:
    (folder / "test_planned.py").write_text(tests)
    (folder / "conftest.py").write_text(hooks + "\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-c", ROOT / "pyproject.toml", f"--rootdir={folder}", folder),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout
