"""Other people's protocols: their functions as scenarios, searched, explained.

Read in this order: `scenario.py` (what a scenario function is), `source.py` (where it stands),
`search.py` (find a failure, shrink it, save it, draw it), `marked.py` (that for tests), `drawn.py` (for those
that Hypothesis feeds).
"""

from .scenario import file_stem, is_own, label_of, own_change, own_scenario, standing_hints
from .search import Found, Hint, examine, search
from .source import functions_of

__all__ = [
    "Found",
    "Hint",
    "examine",
    "file_stem",
    "functions_of",
    "is_own",
    "label_of",
    "own_change",
    "own_scenario",
    "search",
    "standing_hints",
]
