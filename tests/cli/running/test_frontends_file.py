"""The file by which frontends that `trinamo up` has not started are found."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trinamo.cli.running.frontends_file import FrontendsFile, find_frontends
from trinamo.transports.assembly.run_file import ProcessEntry


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder of the test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_frontends_of_another_build_are_found() -> None:
    """They have written more, of themselves and of each process."""
    with FrontendsFile.kept() as file:
        file.publish("http://127.0.0.1:1", ["a:1"], [ProcessEntry("frontend", os.getpid())])
        written = json.loads(file.path.read_text())
        written["processes"][0]["later"] = written["later"] = 1
        file.path.write_text(json.dumps(written))

        assert find_frontends() == [file]


def test_a_file_that_cannot_be_read_is_left_to_the_process_that_it_is_called_after() -> None:
    with FrontendsFile.kept() as file:
        file.publish("http://127.0.0.1:1", ["a:1"], [])
        file.path.write_text("{}")
        gone = file.path.with_name(f"none{file.path.suffix}")
        gone.write_text("{}")

        assert find_frontends() == []
        assert file.path.exists()
        assert not gone.exists()
