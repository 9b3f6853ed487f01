"""What `trinamo doctor` found, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.table import Table
from rich.text import Text

from trinamo.runtime.logs.text import one_line

from .finding import Finding, Verdict

_SIGNS: Final = {
    Verdict.GOOD: ("ok", "green"),
    Verdict.NOTE: ("-", "dim"),
    Verdict.WARNING: ("warning", "yellow"),
    Verdict.MISSING: ("missing", "bold red"),
}


def findings_table(findings: Sequence[Finding]) -> Table:
    """One row a finding; what mends it stands below its text."""
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
