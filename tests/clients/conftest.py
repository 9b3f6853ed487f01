"""`--all`: the long list of programs, and the page that tells what became of each."""

from __future__ import annotations

from contextlib import suppress

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    with suppress(ValueError):
        parser.addoption(
            "--all", action="store_true", help="try the long list, and write docs/clients.md"
        )
