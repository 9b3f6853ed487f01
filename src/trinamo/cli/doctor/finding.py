"""One thing that `trinamo doctor` looked at, and all of them as a table."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import attrs

from trinamo.runtime.logs.text import one_line

if TYPE_CHECKING:
    from rich.table import Table


class FindingVerdict(enum.StrEnum):
    """How good a finding is."""

    GOOD = "good"
    NOTE = "note"
    WARNING = "warning"
    MISSING = "missing"
    """Needed, and not there: `doctor` exits 1."""


@attrs.frozen
class Finding:
    """One thing looked at; `remedy` is what mends it, a command where there is one."""

    what: str
    verdict: FindingVerdict
    text: str
    remedy: str = ""


_SIGNS: Final = {
    FindingVerdict.GOOD: ("ok", "green"),
    FindingVerdict.NOTE: ("-", "dim"),
    FindingVerdict.WARNING: ("warning", "yellow"),
    FindingVerdict.MISSING: ("missing", "bold red"),
}


def findings_table(findings: Sequence[Finding]) -> Table:
    """One row a finding; what mends it stands below its text."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what")
    table.add_column("")
    table.add_column("found", overflow="fold")
    for each in findings:
        sign, style = _SIGNS[each.verdict]
        # Servers that were asked may have said it.
        text = Text(one_line(each.text))
        if each.remedy:
            text.append(f"\n→ {each.remedy}", style="bold")
        table.add_row(each.what, Text(sign, style=style), text)
    return table
