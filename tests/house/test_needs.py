"""What was skipped is told at the end of a run, with the command that brings what was lacking."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.session.needs import CHROMIUM, GPU, Need, skipped_text
from tests.sources import ROOT, listed, nodes_of, other_files, tree_of

HANGS_S = 600
SKIPS = {"skip", "skipif", "importorskip"}


def test_the_end_of_a_run_names_what_was_lacking_and_what_brings_it(tmp_path: Path) -> None:
    """A real run on a machine whose search path has no browser."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", browser_tests()],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "× no Chromium (apt-get install chromium)" in done.stdout


def test_a_skip_inside_a_test_of_trio_keeps_its_reason(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "from tests.session import needs\n\n\nasync def test_a():\n    needs.GPU.lacking()\n"
    )
    (tmp_path / "conftest.py").write_text("from tests.conftest import *  # noqa: F403\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}", str(tmp_path)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert "1 skipped: no NVIDIA GPU (run on a machine with one)" in done.stdout, done.stdout


def browser_tests() -> str:
    return str(next((ROOT / "tests").rglob("test_page_in_a_browser.py")))


def test_what_is_lacking_is_counted_once_for_each_reason() -> None:
    reasons = [f"Skipped: {need.reason}" for need in (GPU, CHROMIUM, GPU)]
    assert skipped_text(reasons) == (
        "3 skipped: 2 × no NVIDIA GPU (run on a machine with one),"
        " no Chromium (apt-get install chromium)"
    )
    assert skipped_text([]) == ""


def test_a_package_that_is_not_there_skips_and_one_that_is_does_not() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"no thing \(make it\)"):
        Need("thing", "make it", "there_is_no_such_module").imported()
    assert Need("json", "", "json").imported().__name__ == "json"


def test_nothing_else_skips_a_test() -> None:
    """A reason of its own would miss the command."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in other_files()
        if path.name not in {"needs.py", Path(__file__).name}
        for node in nodes_of(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in SKIPS
        if ast.unparse(node.value) in {"pytest", "pytest.mark"}
    ]
    assert not found, listed(found)
