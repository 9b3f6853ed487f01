"""The guide tells the truth: its files are written, its commands run, in the order of the page."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

pytestmark = pytest.mark.check

PAGE = ROOT / "docs/simulate_your_own_protocol.md"
FENCE = re.compile(r"^```(python|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def said(folder: Path, *words: str) -> tuple[int, str]:
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        words,
        cwd=folder,
        env=os.environ | {"PATH": beside, "PYTHONWARNINGS": "error"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def shows(output: str, line: str) -> bool:
    """Whether a line of the output is the one of the page, whose `…` stands for anything."""
    pieces = [re.escape(piece) for piece in line.strip().split("…")]
    return re.search(".*".join(pieces), output) is not None


def write_and_run(folder: Path, code: str) -> None:
    name = code.partition("\n")[0].removeprefix("# ")
    (folder / name).write_text(code)
    if re.search(r"^assert ", code, re.MULTILINE):
        status, output = said(folder, sys.executable, name)
        assert status == 0, f"{name}: {output}"


def play(folder: Path, session: str) -> None:
    for part in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        if command.startswith("pip "):
            continue
        words = shlex.split(command)
        if words[0] == "pytest":
            words[:1] = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        _, output = said(folder, *words)
        missing = [line for line in expected.splitlines() if not shows(output, line)]
        assert not missing, f"{command}: {missing} not in\n{output}"


# Each half begins in an empty folder, as nothing of the first is used in the second.
HALVES = PAGE.read_text("utf-8").partition("## 6. Two leaders")[::2]


@pytest.mark.parametrize(
    ("half", "drawn"),
    [(HALVES[0], "small.html"), (HALVES[1], "leaders.html")],
    ids=["register", "election"],
)
def test_the_guide_leads_from_an_empty_folder_to_a_bug(
    tmp_path: Path, half: str, drawn: str
) -> None:
    blocks = FENCE.findall(half)
    assert len(blocks) >= 4
    for kind, body in blocks:
        if kind == "python":
            write_and_run(tmp_path, body)
        else:
            play(tmp_path, body)
    assert "space-time" in (tmp_path / "found" / drawn).read_text("utf-8").lower()
