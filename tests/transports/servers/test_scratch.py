"""Scratch directories: gone with their owner, at the latest when the next one comes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from trinamo.transports.servers.process import LOCK_NAME, scratch_directory


def age(directory: Path) -> None:
    os.utime(directory / LOCK_NAME, (0, 0))


def test_a_directory_is_gone_after_use(tmp_path: Path) -> None:
    with scratch_directory("kind-", parent=tmp_path) as directory:
        (directory / "data").write_bytes(b"1")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_owner_left_is_deleted_by_the_next(tmp_path: Path) -> None:
    script = (
        "import os, pathlib\n"
        "from trinamo.transports.servers.process import scratch_directory\n"
        f"with scratch_directory('kind-', parent=pathlib.Path({str(tmp_path)!r})):\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=False)
    (left,) = tmp_path.iterdir()
    age(left)
    with scratch_directory("kind-", parent=tmp_path) as directory:
        assert list(tmp_path.iterdir()) == [directory]


def test_what_is_held_young_or_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other-1"
    young = tmp_path / "kind-young"
    for directory in (other, young):
        directory.mkdir()
        (directory / LOCK_NAME).touch()
    age(other)
    with scratch_directory("kind-", parent=tmp_path) as held:
        age(held)
        with scratch_directory("kind-", parent=tmp_path):
            assert held.exists()
            assert young.exists()
            assert other.exists()
