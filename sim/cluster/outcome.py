"""What became of a run: what it left behind, and which invariants do not hold.

Who judges it is `checks/`; who plays it is `scenario/run.py`.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from ..core.trace import Row
    from ..core.world import World
    from ..net.network import Network
    from .cluster import Cluster
    from .plans import Scenario


@attrs.frozen
class BrokenRule:
    """One invariant that does not hold, when it was noticed, and what was seen."""

    invariant: str
    text: str
    at_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.invariant}: {self.text}"


@attrs.define(eq=False, slots=False)
class Outcome:
    """What became of a run."""

    scenario: Scenario
    world: World
    network: Network
    cluster: Cluster
    digest: str = ""
    violations: list[BrokenRule] = attrs.Factory(list)
    load_ended_s: float | None = None
    healed_s: float | None = None
    is_settled: bool = False
    """Whether nothing of any request was left in the end."""
    leftovers: dict[str, float] = attrs.Factory(dict)
    core: tuple[str, ...] = ()
    """The healed hosts of a liveness phase."""

    @cached_property
    def told(self) -> list[Row]:
        """What the trace says without its busiest rows; read once the run is over."""
        return self.world.trace.told

    def violate(self, invariant: str, text: str) -> None:
        """Write one down."""
        self.violations.append(BrokenRule(invariant, text, self.world.current_time()))
