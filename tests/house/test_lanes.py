"""How the tests are spread over processes: what belongs together stays together, and in one order."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.session.lanes import FIRST, SPREAD, rank, unit_of
from tests.sources import ROOT, tree_of

SHARES = {"module", "class", "package"}


def test_a_file_stays_in_one_process() -> None:
    file = "tests/cli/up/test_up.py"
    assert {unit_of(f"{file}::test_{name}") for name in ("one", "two[a::b]")} == {file}


def test_what_starts_processes_comes_first_and_what_fills_gaps_last() -> None:
    files = ["tests/cluster/test_a.py", "properties/test_b.py", f"tests/sim/{SPREAD[0]}"]
    assert sorted(files, key=rank) == files


def test_the_folders_and_files_that_are_named_exist() -> None:
    assert [folder for folder in FIRST if not (ROOT / folder).is_dir()] == []
    assert [name for name in SPREAD if len(found(name)) != 1] == []


def found(name: str) -> list[Path]:
    return [*(ROOT / "tests").rglob(name)]


def test_tests_that_are_spread_one_by_one_share_no_fixture() -> None:
    """Each process would make its own."""
    shared = [
        f"{name}:{node.lineno}"
        for name in SPREAD
        for path in found(name)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.keyword) and node.arg == "scope"
        if isinstance(node.value, ast.Constant) and node.value.value in SHARES
    ]
    assert shared == []
