"""One thing that `trinamo doctor` looked at."""

from __future__ import annotations

import enum

import attrs


class Verdict(enum.StrEnum):
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
    verdict: Verdict
    text: str
    remedy: str = ""
