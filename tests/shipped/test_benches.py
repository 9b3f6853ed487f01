"""The benchmarks of the data path still run: hardly anything is asked, and nothing may be lost."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.needs import C_COMPILER
from tests.sources import ROOT


def run(name: str, cache: Path, *arguments: str) -> list[list[str]]:
    """The rows of the table that a benchmark prints, without the head."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / name), "--quick", *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={
            "PATH": str(Path(sys.executable).parent) + ":/usr/bin:/bin",
            "HOME": str(cache),
            # After these a decode worker computes a prompt by itself.
            "TRINAMO_DISAGGREGATION__QUEUE_TIMEOUT_S": "60",
        },
    )
    assert done.returncode == 0, done.stderr
    return [line.strip("| ").split(" | ") for line in done.stdout.splitlines()]


@C_COMPILER.unless(shutil.which("cc") is not None)
def test_every_load_over_http_is_answered_whole(tmp_path: Path) -> None:
    rows = run("bench_http.py", tmp_path, "--kind", "trinamo", "--kind", "floor")[2:]

    assert {kind for _, kind, *_ in rows} == {"trinamo", "floor"}
    assert {errors for *_, errors in rows} == {"0"}


def test_every_form_of_an_answer_is_measured(tmp_path: Path) -> None:
    rows = run("serving/bench_dialects.py", tmp_path)[2:]

    assert [row[0] for row in rows] == ["chat", "responses", "messages"]


def test_every_load_over_rpc_is_answered_whole(tmp_path: Path) -> None:
    rows = run("bench_rpc.py", tmp_path, "--kind", "trinamo")[2:]

    assert {row[1] for row in rows if len(row) == 5} == {"trinamo"}
    assert sum(row[0].startswith("kills") for row in rows) == 2


@C_COMPILER.unless(shutil.which("cc") is not None)
def test_a_stalled_reader_and_killed_processes_are_measured(tmp_path: Path) -> None:
    rows = run("bench_isolation.py", tmp_path)

    assert [row[0].split(" killed")[0] for row in rows] == ["a stalled reader", "caller", "worker"]


def test_prompts_that_are_computed_elsewhere_are_measured(tmp_path: Path) -> None:
    """A prompt of 1,100 tokens fills 69 blocks, all of which come from the prefill worker."""
    rows = run(
        "serving/bench_disaggregation.py",
        tmp_path,
        *("--engine", "exact", "--kind", "prefill_first"),
    )[2:]

    row = next(row for row in rows if row[0] == "exact")
    assert row[1] == "prefill_first"
    assert row[-1] == "69"
