"""Mistakes that are put into the code on purpose, to see that a scenario finds them.

A simulator that finds nothing may be blind. So each scenario has mutants: the same play with one of
these mistakes planted (`planting.py`), which some seed must show. They are mistakes of other systems,
and possible ones of ours; each file holds those of one subject.
"""

from . import (
    disaggregation_bugs,
    edge_bugs,
    link_bugs,
    migration_bugs,
    plane_bugs,
    stream_bugs,
    transfer_bugs,
)
from .planting import BUGS, planted

__all__ = [
    "BUGS",
    "disaggregation_bugs",
    "edge_bugs",
    "link_bugs",
    "migration_bugs",
    "plane_bugs",
    "planted",
    "stream_bugs",
    "transfer_bugs",
]
