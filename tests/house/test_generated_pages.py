"""The pages that are made from the code say what the code says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import trinamo
from docs.generators import PAGES
from docs.generators.api import public_names
from docs.generators.index import index_page
from docs.generators.protocols import protocol_page
from tests.sources import ROOT
from trinamo.runtime.protocol.streams.machine import Role, Tables
from trinamo.runtime.protocol.streams.request_stream import REQUEST_STREAM
from trinamo.runtime.protocol.streams.response_stream import RESPONSE_STREAM


@pytest.mark.parametrize("name", PAGES)
def test_the_page_equals_the_code(name: str) -> None:
    """Mend it with `make docs`."""
    assert (ROOT / "docs" / name).read_text("utf-8") == PAGES[name]()


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    sections = public_names()
    names = [name for names in sections.values() for name in names]

    assert sorted(names) == dir(trinamo)
    assert [name for name in names if f"| `{name}` | " not in page] == []
    assert [title for title in sections if f"## {title}\n" not in page] == []


def test_every_page_is_in_the_index_with_a_sentence_of_its_own() -> None:
    rows = [line for line in index_page().splitlines() if line.startswith("* [")]
    names = {re.findall(r"\]\(([^)]+)\)", row)[0] for row in rows}
    docs = ROOT / "docs"

    assert names == {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - {
        "index.md"
    }
    told = [row.partition(".md): ")[2] for row in rows if "(decisions/" not in row]
    assert [each for each in told if not re.fullmatch(r"[^#>|!`].*[.:]", each)] == []


@pytest.mark.parametrize("tables", [RESPONSE_STREAM, REQUEST_STREAM])
def test_every_row_and_every_coupling_is_on_the_page(tables: Tables) -> None:
    page = protocol_page(tables)
    for role in Role:
        for state, steps in tables.transitions[role].items():
            for event, following in steps.items():
                row = f"| {state.name} | {state.value} | {event.__name__} | {following.name} |"
                assert row in page
    for (worker, caller), (moved, into) in tables.couplings.items():
        assert f"| {worker.name} | {caller.name} | the {moved.value} to {into.name} |" in page


def test_the_command_writes_what_is_there_already() -> None:
    before = {name: (ROOT / "docs" / name).read_bytes() for name in PAGES}
    command = [sys.executable, "-W", "error", "-m", "docs.generators"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)

    assert {name: (ROOT / "docs" / name).read_bytes() for name in PAGES} == before
