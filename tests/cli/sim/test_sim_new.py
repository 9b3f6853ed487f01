"""`trinamo sim new DIR`: what it writes runs, holds, and finds the mistake its README tells to make."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRINAMO = Path(sys.executable).with_name("trinamo")


def said(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    done = said(tmp_path, TRINAMO, "sim", "new", "counter")
    assert done.returncode == 0, done.stderr
    assert "cd counter && trinamo sim swarm scenario.py" in done.stdout
    return tmp_path / "counter"


def test_a_new_project_holds_until_it_is_broken_as_its_readme_says(project: Path) -> None:
    files = sorted(path.name for path in project.iterdir())
    assert files == ["README.md", "protocol.py", "scenario.py", "test_scenario.py"]
    readme = (project / "README.md").read_text()
    assert len(readme.splitlines()) <= 60
    assert "docs/" not in readme, "a package has no such folder"
    tested = said(project, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".")
    assert "1 passed" in tested.stdout, tested.stdout
    protocol = project / "protocol.py"
    line = 'if request["id"] not in self.seen:'
    assert line in protocol.read_text()
    protocol.write_text(protocol.read_text().replace(line, "if True:"))
    found = said(project, TRINAMO, "sim", "swarm", "scenario.py", "--seeds", "0..20")
    assert (found.returncode, "each request counts once broken" in found.stdout) == (1, True)
    tested = said(project, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".")
    assert "replay: trinamo sim replay failures/" in tested.stdout
    assert len([*project.glob("failures/*.html")]) == 1


def test_a_folder_that_holds_something_is_left_alone(project: Path) -> None:
    (project / "protocol.py").write_text("mine")
    done = said(project.parent, TRINAMO, "sim", "new", "counter")
    assert (done.returncode, "is not empty" in done.stderr) == (2, True)
    assert (project / "protocol.py").read_text() == "mine"
