"""The sources are parsed once for all rules, and forgotten with the last: they are hundreds of megabytes.

Python's collector would look through them for the rest of the run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import sources


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent):
        sources.forget()
