"""`trinamo sim new DIR`: a small protocol with its scenario and its test, to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from .files import refuse

# Kept as text: no part of this program, and Python only where it is written to.
TEMPLATE: Final = Path(__file__).parent / "template"


def write_project(folder: Path) -> list[Path]:
    """Write the files of the template into a folder that is new or empty; what was written."""
    sources = sorted(TEMPLATE.iterdir())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            refuse(f"{folder} is not empty; name a folder that is new")
        written = []
        for source in sources:
            target = folder / source.name.removesuffix(".txt")
            target.write_text(source.read_text("utf-8"), "utf-8")
            written.append(target)
    except OSError as error:
        refuse(f"{folder} cannot be written: {error.strerror}")
    return written
