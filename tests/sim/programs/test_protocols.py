"""The protocols among the examples: the mistake of each is found, and the mended one holds."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator

import pytest

from tests.sources import ROOT
from trinamo.sim import search

FOLDER = ROOT / "examples/protocols"


@pytest.fixture(autouse=True)
def on_the_path() -> Iterator[None]:
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


PROTOCOLS = (
    ("two_phase_commit", "forgetful", "careful", "all or none"),
    ("lock_service", "trusting", "fenced", "counts are not lost"),
    ("replicated_log", "hasty", "synced", "what was told is kept"),
)


@pytest.mark.parametrize(
    ("module", "broken", "mended", "rule"),
    # The other two take seven seconds of CPU each.
    [pytest.param(*each, marks=pytest.mark.check) for each in PROTOCOLS[:2]] + [PROTOCOLS[2]],
)
def test_the_mistake_is_found_and_the_mended_one_holds(
    module: str, broken: str, mended: str, rule: str
) -> None:
    protocol = importlib.import_module(module)
    found = search(getattr(protocol, broken), seeds=range(40))

    assert found is not None
    assert found.rule == rule
    page = (FOLDER / f"{module}.md").read_text("utf-8")
    left = len(re.findall("^  decision ", page, re.MULTILINE))
    assert len(found.decisions) == left, json.dumps([str(each) for each in found.decisions])
    assert all(choice.label in page for choice in found.decisions)
    assert search(getattr(protocol, mended), seeds=range(1000, 1040)) is None
