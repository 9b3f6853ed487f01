"""What `docs/operations.md` says about many machines, taken from the page word for word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import attrs
import yaml

from tests.sources import ROOT

PAGE: Final = ROOT / "docs" / "operations.md"
# A fenced block, or a heading outside of any: what begins with `#` in a file is a comment.
_PIECE: Final = re.compile(r"^```(\w*)\n(.*?)^```$|^#+ ([^\n]+)$", re.DOTALL | re.MULTILINE)


@attrs.frozen
class Section:
    """The blocks of one section, those of its subsections left out."""

    files: list[str]
    """YAML, with its comments."""
    commands: list[str]

    def command(self, words: str) -> str:
        """The command that begins so."""
        found = [each for each in self.commands if each.startswith(words)]
        assert len(found) == 1, f"the page says {words!r} {len(found)} times"
        return found[0]


def section(title: str, page: Path = PAGE) -> Section:
    """The section under this heading, without its `#`."""
    found = Section([], [])
    heading = ""
    for language, text, begun in _PIECE.findall(page.read_text("utf-8")):
        heading = begun or heading
        if heading == title and language == "yaml":
            found.files.append(text)
        elif heading == title and language == "console":
            lines = (line for line in text.splitlines() if line.startswith("$ "))
            found.commands.extend(line.removeprefix("$ ") for line in lines)
    return found


def merged(*texts: str, **more: Any) -> dict[str, Any]:
    """Several files as one, as somebody writes them together; a later one wins key by key."""
    whole: dict[str, Any] = {}
    for part in (*map(yaml.safe_load, texts), more):
        _merge(whole, part)
    return whole


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict):
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = value
