"""Completion of `--engine`: ours by name, and what files of the current folder decorate as an engine.

Nothing is imported: files are only read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from trinamo.runtime.config.models import ENGINES

FILES_MAX: Final = 256
FILE_BYTES_MAX: Final = 1 << 20
_DECORATED: Final = re.compile(
    r"^@(?:trinamo\.)?engine\b.*?^(?:async +def|def|class) +(\w+)", re.MULTILINE | re.DOTALL
)


def complete_engine(incomplete: str) -> list[str]:
    """The engines whose names begin so."""
    found = [*ENGINES, *_own_engines(incomplete)]
    return [name for name in found if name.startswith(incomplete)]


def _own_engines(incomplete: str) -> Iterator[str]:
    folder = incomplete.rpartition("/")[0]
    prefix = f"{folder}/" if folder or incomplete.startswith("/") else ""
    try:
        files = sorted(Path(prefix or ".").glob("*.py"))[:FILES_MAX]
        for path in files:
            with path.open("rb") as file:
                text = file.read(FILE_BYTES_MAX).decode("utf-8", "replace")
            for name in _DECORATED.findall(text):
                yield f"{prefix}{path.name}:{name}"
    except OSError:
        return
