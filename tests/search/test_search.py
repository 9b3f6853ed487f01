"""`make search` finds what is planted, keeps it, and says how to play it again."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.clients.environments import INSTALL_TIMEOUT_S, InstallError
from tests.needs import A_PROGRAM
from tests.published.test_published import ENVIRONMENT
from tests.search.portfolio import FLOOR, Portfolio
from tests.search.work import Published, property_files
from tests.sources import ROOT

FALSE = """
from hypothesis import given, strategies as st

@given(st.integers())
def test_all_numbers_are_small(number):
    assert number < 1000
"""


def run(command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def search(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    options = ("--minutes", "0.001", "--jobs", "1", "--out", str(out))
    return run([sys.executable, "-m", "tests.search", *options, *words])


def replay(said: str) -> subprocess.CompletedProcess[str]:
    """Do what the line says that tells how."""
    (line,) = [line for line in said.splitlines() if sys.executable in line]
    words = shlex.split(line)
    settings = dict(word.split("=", 1) for word in words[: words.index(sys.executable)])
    return run(words[len(settings) :], **settings)


def test_a_planted_mistake_is_found_kept_and_played_again(tmp_path: Path) -> None:
    done = search(tmp_path, "--only", "stop", "--bug", "stop_unheard", "--first", "7")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "I3 broken" in done.stdout
    assert len([*tmp_path.glob("stop-*-7.json")]) == 1
    again = replay(done.stdout)
    assert (again.returncode, "I3 broken" in again.stdout) == (1, True)


def test_a_property_that_fails_is_kept_and_played_again(tmp_path: Path) -> None:
    wrong = tmp_path / "test_wrong.py"
    wrong.write_text(FALSE, "utf-8")
    done = search(tmp_path / "out", "--only", str(wrong))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failures" in done.stdout
    again = replay(done.stdout)
    assert (again.returncode, "number=1000" in again.stdout) == (1, True)


def test_what_holds_leaves_nothing_behind(tmp_path: Path) -> None:
    done = search(tmp_path, "--only", "stop", "--policy", "step")
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 runs of 1 scenarios, 0 rounds of 0 others, 0 failures" in done.stdout
    assert [*tmp_path.iterdir()] == []


@pytest.mark.check
@pytest.mark.timeout(INSTALL_TIMEOUT_S + 600)
def test_a_library_s_known_finding_is_no_failure_and_another_is_kept(tmp_path: Path) -> None:
    try:
        ENVIRONMENT.make()
    except InstallError:
        A_PROGRAM.lacking()
    done = search(tmp_path, "--only", "published/locks/aiorwlock_", "--first", "1")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "1 rounds of 1 others, 0 failures" in done.stdout
    piece = Published("locks/aiojobs_", "nothing", 1, 12, ENVIRONMENT.folder)
    first = piece().failed[0]
    assert first.startswith("published/locks/aiojobs_: at most two jobs run")
    setting, *words = shlex.split(piece.command(first))
    again = run(words, **dict([setting.split("=", 1)]))
    assert '"failed": {"' in again.stdout


def test_policies_that_find_have_more_turns_and_none_goes_without() -> None:
    portfolio = Portfolio(("batch", "pct", "step"))
    assert [portfolio.next("a") for _ in range(6)] == ["batch", "pct", "step"] * 2
    for policy in portfolio.policies:
        portfolio.add(policy, runs=1000, found=9 if policy == "pct" else 0)
    turns = Counter(portfolio.next("b") for _ in range(100))
    assert turns["pct"] > 50
    assert turns["batch"] >= 100 * FLOOR / 3 - 1 <= turns["step"]
    assert str(portfolio).startswith("pct found 9 in 1000 runs (5")
    # What finds nothing in very many runs more still has its turns.
    portfolio.add("batch", runs=10**6, found=0)
    assert portfolio.share("batch") >= FLOOR / 3
    assert sum(map(portfolio.share, portfolio.policies)) == pytest.approx(1)


def test_the_properties_are_found_wherever_they_stand() -> None:
    files = property_files()
    assert "properties/simulated/test_cluster_survives.py" in files
    assert any(file.startswith("tests/") for file in files)
