"""Processes that cannot start, or crash: one sentence says what of."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cli.places import Place, cluster, wait_for

# Python runs it at its start, before anything else.
CRASHES_AT_A_SIGNAL = """
import signal

def crash(*_):
    error = MemoryError("no room for 4 GB")
    for _ in range(20):
        error = ExceptionGroup("unhandled errors in a nursery", [error])
    raise error

signal.signal(signal.SIGUSR1, crash)
"""


def test_the_cause_of_a_crash_is_told_and_the_child_started_again(tmp_path: Path) -> None:
    """Before: a traceback cut at ten groups, the cause below the cut."""
    (tmp_path / "sitecustomize.py").write_text(CRASHES_AT_A_SIGNAL)
    place = Place(tmp_path, {"PYTHONPATH": str(tmp_path)})
    with cluster(place, "--engine", "echo", "--workers", "1") as running:
        [worker] = [pid for pid, line in running.children.items() if " worker " in line]

        os.kill(worker, signal.SIGUSR1)

        wait_for(lambda: "worker-1 is back" in place.output, 300, "the worker's return")
        [ending] = [line for line in place.output.splitlines() if "starting it again" in line]
        assert "worker-1 exited with status 1" in ending
        assert "MemoryError: no room for 4 GB" in ending


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("worker.kv_blocks=1", "1 blocks of 16 tokens do not hold one context of 2048 tokens"),
        # Before: a traceback after 19 s, in which the tables of the context were computed.
        ("worker.context_tokens_max=1048576", "do not hold one context of 1048576 tokens"),
        # Before: these two started, and answered nothing but 400.
        ("worker.context_tokens_max=1", "worker.context_tokens_max"),
        ("data_plane.tcp.header_bytes_max=1", "data_plane.tcp.header_bytes_max"),
        ("data_plane.tcp.data_bytes_max=1", "data_plane.tcp.data_bytes_max"),
        ("http.body_bytes_max=1", "http.body_bytes_max"),
        ("http.header_bytes_max=1", "http.header_bytes_max"),
    ],
)
def test_a_bound_that_cannot_work_is_one_sentence(tmp_path: Path, setting: str, words: str) -> None:
    memory = ["--set", "control_plane.backend=memory", "--set", "event_plane.backend=memory"]
    done = Place(tmp_path).run("worker", "--engine", "exact", *memory, "--set", setting)

    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("trinamo: ")
    assert words in line
