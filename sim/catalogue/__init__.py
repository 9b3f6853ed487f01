"""The scenarios that ship: every row of the protocol's event table, and the failures S2 to S11.

Each `*.toml` here is one scenario; `mutants/` holds the mistakes that their mutants put back.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def scenario_paths() -> list[Path]:
    """The shipped scenario files, by name."""
    return sorted(FOLDER.glob("*.toml"))
