"""The code of docs/testing_with_the_simulator.md, as a reader would save it and run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

PAGE = (ROOT / "docs/testing_with_the_simulator.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
NAMES = (
    "test_store.py",
    "test_rules.py",
    "test_models.py",
    "test_state.py",
    "test_hypothesis.py",
    "test_labels.py",
)


@pytest.mark.check
def test_the_code_of_the_page_does_what_the_page_says(tmp_path: Path) -> None:
    """One test fails, with the words that the page shows; the others pass."""
    for name, block in zip(NAMES, BLOCKS, strict=True):
        (tmp_path / name).write_text(block)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "trinamo.pytest_plugin"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "1 failed, 4 passed" in done.stdout, done.stdout + done.stderr
    shown = re.search(
        r"^error AssertionError broken in .*?at test_store[^\n]*", PAGE, re.DOTALL | re.MULTILINE
    )
    assert shown is not None
    for line in shown[0].splitlines():
        assert line in done.stdout, done.stdout
