"""How the tests are spread over processes: what belongs together stays together, and in one order."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.session.lanes import ONE_BY_ONE, SPREAD, TOGETHER, costs, deal, unit_of
from tests.sources import ROOT, nodes_of, other_files, tree_of

HANGS_S = 600
OTHERS = ("trinamo.pytest_plugin", "anyio", "pytest_cov")
SHARES = {"module", "class", "package"}
TESTS = """
import os
from pathlib import Path

import pytest

Path(__file__).with_suffix(f".{os.environ['PYTEST_XDIST_WORKER']}").touch()


def test_once(): ...


@pytest.mark.skip(reason="no thing (make it)")
def test_skipped(): ...


def test_twice():
    started = Path(__file__).with_suffix(".started")
    if "DIES" != "" and not started.exists():
        started.touch()
        os._exit(1)
    assert "FAILS" == "", "as planned"
"""


def test_a_file_stays_in_one_process() -> None:
    file = "tests/cli/up/test_up.py"
    assert {unit_of(f"{file}::test_{name}") for name in ("one", "two[a::b]")} == {file}
    assert unit_of(f"{ONE_BY_ONE[0]}::test_one") == f"{ONE_BY_ONE[0]}::test_one"


def test_files_are_dealt_once_dear_ones_first_and_always_alike() -> None:
    files = [f"tests/test_{name}.py" for name in "abcdef"]
    spread = f"{SPREAD[1]}test_g.py"
    together = [f"{TOGETHER[0]}test_{name}.py" for name in "xy"]
    costs = {files[3]: 50.0, files[1]: 20.0, files[5]: 25.0}

    dealt = deal([*files, spread, *together], 2, costs)

    assert dealt[0] == [files[3]]
    assert dealt[1][:2] == [files[5], files[1]]
    assert sorted(dealt[1]) == sorted([*files, *together][:3] + files[4:] + together)
    assert deal(reversed([*together, spread, *files]), 2, costs) == dealt


def test_files_that_start_clusters_are_played_by_one_process_of_two() -> None:
    files = [f"tests/test_{name}.py" for name in "abcdefgh"]
    costs = dict.fromkeys(files, 10.0)

    first, second, third, fourth = deal(files, 4, costs, crowded=files[2:])

    assert first == files[2::2]
    assert second == files[3::2]
    assert sorted(third + fourth) == files[:2]
    assert deal(files, 1, costs, crowded=files[2:]) == [files[2:] + files[:2]]


def test_the_folders_and_files_that_are_named_exist() -> None:
    named = {*TOGETHER, *SPREAD, *ONE_BY_ONE, *costs()}
    assert [each for each in sorted(named) if not (ROOT / each).exists()] == []


def test_tests_that_are_spread_one_by_one_share_no_fixture() -> None:
    """Each process would make its own."""
    shared = [
        f"{name}:{node.lineno}"
        for name in ONE_BY_ONE
        for node in nodes_of(tree_of(ROOT / name))
        if isinstance(node, ast.keyword) and node.arg == "scope"
        if isinstance(node.value, ast.Constant) and node.value.value in SHARES
    ]
    assert shared == []


def test_what_make_test_leaves_out_is_a_step_of_ci() -> None:
    makefile, ci = ((ROOT / name).read_text("utf-8") for name in ("Makefile", ".ci/run"))
    (apart,) = re.findall(r"^APART := (.+)$", makefile, re.MULTILINE)
    (steps,) = re.findall(r"^for step in (.+); do$", ci, re.MULTILINE)

    assert steps.split() == apart.split(" or ")
    for step in steps.split():
        assert re.search(rf"^{step}: .+\n\t\$\(MARKED\)$", makefile, re.MULTILINE), step
        used = rf"mark\.{step}\b"
        assert any(re.search(used, path.read_text("utf-8")) for path in other_files()), step


def play(folder: Path, *options: str, **words: str) -> str:
    """What a run of some files in two processes says; `words` replace some of the tests' own."""
    (folder / "properties").mkdir()
    for name in "abcdef":
        path = folder / ("properties" if name in "ef" else "") / f"test_{name}.py"
        text = TESTS
        for old, new in words.items():
            text = text.replace(f'"{old}"', f'"{new * (name == "c")}"')
        path.write_text(text)
    (folder / "conftest.py").write_text(
        "from tests.session.lanes import *\n"
        "from tests.session.needs import pytest_terminal_summary\n"
    )
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-n", "2", *options),
            # What else is installed for pytest costs more to load than this to run.
            *(f"-pno:{each}" for each in ("cacheprovider", "hypothesispytest", "trio", *OTHERS)),
            *(f"--rootdir={folder}", str(folder)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS_S,
    )
    return done.stdout


def readers(folder: Path) -> dict[str, int]:
    """How many processes have read each file."""
    return {
        path.stem: len([*path.parent.glob(f"{path.stem}.gw*")]) for path in folder.rglob("*.py")
    }


@pytest.mark.slow
def test_each_file_is_read_in_one_process_and_each_test_runs_once(tmp_path: Path) -> None:
    said = play(tmp_path, DIES="", FAILS="")

    assert "12 passed, 6 skipped" in said, said
    assert "6 skipped: 6 × no thing (make it)" in said
    found = readers(tmp_path)
    assert [found[f"test_{name}"] for name in "abcd"] == [1, 1, 1, 1]
    assert [found[f"test_{name}"] for name in "ef"] == [2, 2]


@pytest.mark.slow
def test_a_failure_is_told_and_with_x_the_rest_is_left(tmp_path: Path) -> None:
    said = play(tmp_path, "-x", DIES="", FAILS="is no empty text")

    assert "as planned" in said, said
    assert "stopping after 1 failures" in said
    assert "1 failed" in said


@pytest.mark.slow
def test_the_files_of_a_process_that_dies_go_to_the_one_that_takes_its_place(
    tmp_path: Path,
) -> None:
    said = play(tmp_path, DIES="once", FAILS="")

    assert "crashed while running" in said, said
    assert "1 failed, 12 passed, 6 skipped" in said, said
