from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinamo.runtime.process.state_diagrams import PAGES, main, render
from trinamo.runtime.protocol.streams.machine import Role, Tables
from trinamo.runtime.protocol.streams.request_stream import REQUEST_STREAM
from trinamo.runtime.protocol.streams.response_stream import RESPONSE_STREAM

DOCS = Path(__file__).parents[3] / "docs" / "protocols"


@pytest.mark.parametrize("name", PAGES)
def test_the_page_equals_the_tables_in_the_code(name: str) -> None:
    """`make docs` writes the pages anew after a change to the tables."""
    assert (DOCS / name).read_text("utf-8") == render(PAGES[name])


@pytest.mark.parametrize("tables", [RESPONSE_STREAM, REQUEST_STREAM])
def test_every_row_and_every_coupling_is_on_the_page(tables: Tables) -> None:
    page = render(tables)
    for role in Role:
        for state, steps in tables.transitions[role].items():
            for event, following in steps.items():
                row = f"| {state.name} | {state.value} | {event.__name__} | {following.name} |"
                assert row in page
    for (worker, caller), (moved, into) in tables.couplings.items():
        assert f"| {worker.name} | {caller.name} | the {moved.value} to {into.name} |" in page


def test_main_writes_the_pages_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main()
    written = {path.name for path in (tmp_path / "docs" / "protocols").iterdir()}
    assert written == set(PAGES)


@pytest.mark.slow
def test_the_command_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "trinamo.runtime.process.state_diagrams"]
    subprocess.run(command, cwd=tmp_path, env=dict(os.environ), check=True, timeout=30)
    assert (tmp_path / "docs" / "protocols" / "response_stream.md").is_file()
