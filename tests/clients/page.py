"""The page of what became of each program: docs/clients.md, written by `make clients ARGS=--all`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tests.clients.programs import Outcome, Program
from tests.sources import ROOT

PAGE: Final = ROOT / "docs" / "clients.md"
HEAD: Final = """# Programs that were tried

What people point at an OpenAI-compatible server, unpatched, and what became of it.

<!-- Written by `make clients ARGS=--all`; edit tests/clients/page.py. -->

Each program runs in an environment of its own against `trinamo up` with two workers and the shipped model,
SmolLM2-135M-Instruct, by llama.cpp. What is tried is what its user needs, not what so small a model knows.
`make clients` tries the first of them with every change; each script is in `tests/clients/scripts/`.

| program | version | what was tried | result |
|---|---|---|---|
"""


def write_page(outcomes: Mapping[Program, Sequence[Outcome]]) -> None:
    """Write it anew."""
    rows = [row(program, found) for program, found in outcomes.items()]
    PAGE.write_text(HEAD + "".join(rows), "utf-8")


def row(program: Program, outcomes: Sequence[Outcome]) -> str:
    failed = [each for each in outcomes if each.failed]
    tried = "; ".join(each.tried for each in outcomes)
    result = f"{len(outcomes) - len(failed)} of {len(outcomes)}"
    if failed:
        result += f"; not {'; '.join(each.tried for each in failed)}"
    cells = (program.name, program.version, tried, result)
    return f"| {' | '.join(each.replace('|', '/') for each in cells)} |\n"
