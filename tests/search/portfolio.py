"""Which policy found what in a search, and how that shares what is played next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Final

import attrs

from trinamo.sim import Policy

FLOOR: Final = 0.5
"""How much of an equal share a policy has that finds nothing."""
RUNS_UNTOLD: Final = 200
"""How many runs a policy is taken to have made before it is judged by what it finds in them."""


@attrs.define
class Portfolio:
    """Counts by policy, and says which is next; equal counts give equal answers.

    It lives as long as a search: what was found is mended before the next, and who found it is no
    better than others at what is left.
    """

    policies: Sequence[Policy]
    runs: Counter[Policy] = attrs.field(factory=Counter)
    found: Counter[Policy] = attrs.field(factory=Counter)
    """Kinds of failure that this policy was the first to show."""
    _given: Counter[tuple[Hashable, Policy]] = attrs.field(factory=Counter)

    def add(self, policy: Policy, *, runs: int, found: int) -> None:
        """Count runs under this policy, and the new kinds of failure in them."""
        self.runs[policy] += runs
        self.found[policy] += found

    def share(self, policy: Policy) -> float:
        """Of what is played next: by failures a run, and never less than `FLOOR` of an equal share."""
        weights = {
            each: (1 + self.found[each]) / (RUNS_UNTOLD + self.runs[each]) for each in self.policies
        }
        by_weight = weights[policy] / sum(weights.values())
        return FLOOR / len(self.policies) + (1 - FLOOR) * by_weight

    def next(self, play: Hashable) -> Policy:
        """The policy for this play whose turns lag most behind its share, the first of equals."""
        policy = max(
            self.policies, key=lambda each: self.share(each) / (1 + self._given[play, each])
        )
        self._given[play, policy] += 1
        return policy

    def __str__(self) -> str:
        return ", ".join(
            f"{each} found {self.found[each]} in {self.runs[each]} runs ({self.share(each):.0%})"
            for each in sorted(self.policies, key=lambda each: (-self.found[each], each))
        )
