from __future__ import annotations

import re

import pytest

from tests.sources import ROOT

PAGE = ROOT / "docs/simulator.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.check
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_code_of_the_page_runs(number: int) -> None:
    exec(compile(BLOCKS[number], f"{PAGE}, block {number}", "exec"), {})


def test_there_is_code_on_the_page() -> None:
    assert len(BLOCKS) == 7
