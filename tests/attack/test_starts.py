"""Configurations that cannot work end with one sentence at the start, not with a traceback later."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.places import Place

pytestmark = [pytest.mark.slow]


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
