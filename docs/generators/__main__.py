"""Write every page that is made from the code."""

from __future__ import annotations

from pathlib import Path

from . import PAGES

for name, make in PAGES.items():
    Path(__file__).parents[1].joinpath(name).write_text(make(), encoding="utf-8")
