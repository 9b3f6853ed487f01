"""A short soak over real processes, one turn of each kind; `make search WHAT=soak` plays longer ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.sources import ROOT


def test_a_short_soak_finds_nothing_that_must_not_happen(tmp_path: Path) -> None:
    """Both kinds of cluster, in which workers, a frontend, etcd and NATS die and come back."""
    words = ("--minutes", "0.4", "--seed", "6", "--clients", "6", "--questions", "8")
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", *words, "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT / "src"))},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    right = re.search(r"^right +(\d+) +(\d+)", done.stdout, re.MULTILINE)
    assert right is not None
    assert min(map(int, right.groups())) > 5
