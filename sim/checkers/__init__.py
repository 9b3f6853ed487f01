"""Rules of one's own, watched while a run goes on: `world.watch(checker)`.

Read in this order: `core/checker.py` (what a checker is), `delivery.py` (what was sent arrives),
`linearizability.py` (operations look as if they happened one at a time) with its `models.py`,
`serializability.py` (so do transactions). What this package does not
do: judge the clusters of the catalogue (`../checks/`).
"""

from ..core.checker import Checker
from .delivery import Delivery
from .linearizability import Linearizability, Operation
from .models import register
from .serializability import Serializability

__all__ = ["Checker", "Delivery", "Linearizability", "Operation", "Serializability", "register"]
