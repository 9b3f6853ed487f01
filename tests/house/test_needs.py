"""What was skipped is told at the end of a run, with the command that brings what was lacking."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from conftest import skipped_text
from tests.needs import CHROMIUM, GPU, Need
from tests.sources import ROOT, listed, nodes_of, other_files, tree_of

SKIPS = {"skip", "skipif", "importorskip"}


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
