"""Every example runs, and shows what its docstring says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.places import Place, cluster
from tests.sources import ROOT

pytestmark = pytest.mark.slow
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def run(name: str, *arguments: str) -> str:
    """The output of an example; fails with its errors if it does."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_every_example_has_a_test() -> None:
    text = Path(__file__).read_text("utf-8")

    assert [name for name in EXAMPLES if f'run("{name}"' not in text] == []


def test_hello_greets_over_the_planes() -> None:
    assert run("hello.py") == "Hello, Ada.\nHello, Grace.\n"


def test_a_consumer_that_leaves_cancels_the_handler() -> None:
    out = run("disconnect.py")

    assert re.search(r"worker: cancelled \(\w+\), [\d.]+ ms after that", out), out


@pytest.mark.services
def test_two_workers_are_asked_in_turn_until_one_leaves() -> None:
    lines = run("two_workers.py").splitlines()

    assert {line.split()[0] for line in lines[:4]} == {"first", "second"}
    assert lines[4] == "the second worker has left"
    assert [line.split()[0] for line in lines[5:]] == ["first", "first"]


@pytest.mark.services
def test_a_killed_worker_is_a_typed_error_and_then_avoided() -> None:
    out = run("kill_a_worker.py")

    assert "the worker was killed: DisconnectedError" in out
    assert out.count("the other worker answers: [0, 1, 2]") == 3


@pytest.mark.services
def test_one_worker_reads_blocks_of_another() -> None:
    lines = run("read_blocks.py").splitlines()

    assert sorted(lines) == [
        "3 blocks by tcp",
        "the owner was told: three blocks read",
        "their bytes are right: True",
    ]


@pytest.mark.services
def test_the_official_client_gets_its_answers(tmp_path: Path) -> None:
    with cluster(Place(tmp_path), "--engine", "echo", "--workers", "1") as running:
        out = run("chat.py", f"{running.url}/v1", "say it back")

    assert out == "model: echo\nwhole: say it back\nstreamed: say it back\n3 tokens\n"
