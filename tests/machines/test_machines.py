"""What the machines of these tests leave behind: nothing, also where a test is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests import needs
from tests.machines.machines import open_machines

KILLED = """
import os, pathlib, signal, sys
from tests.machines.machines import open_machines
with open_machines(pathlib.Path(sys.argv[1]), {"one": 1}, {}):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _made_by(number: int) -> list[Path]:
    folders = (Path("/run/netns"), Path("/sys/class/net"))
    return [each for folder in folders for each in folder.glob(f"tr*{number}*")]


def test_machines_of_a_test_that_was_killed_are_gone_with_the_next(tmp_path: Path) -> None:
    if not needs.can_make_networks():
        needs.NETWORKS.lacking()
    folders = [tmp_path / each for each in ("killed", "next")]
    for each in folders:
        each.mkdir()
    child = subprocess.Popen([sys.executable, "-c", KILLED, folders[0]])
    assert child.wait(120) == -signal.SIGKILL
    assert _made_by(child.pid)
    with open_machines(folders[1], {"one": 1}, {}):
        assert _made_by(child.pid) == []
