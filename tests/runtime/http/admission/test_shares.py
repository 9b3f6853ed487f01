"""Budgets that all clients share: who has most gives way, and nobody else."""

from __future__ import annotations

import attrs

from trinamo.runtime.http.shares import Budget


@attrs.define(eq=False)
class Held:
    """What one stream holds."""

    budget: Budget
    party: str
    name: str
    gone: list[str]

    def hold(self, amount: int) -> None:
        self.budget.hold(self.party, self, amount)

    def give_way(self) -> None:
        self.gone.append(self.name)
        # As whoever ends does in the end, if in vain.
        self.hold(0)


def test_the_party_that_has_most_loses_its_oldest() -> None:
    budget, gone = Budget("a bound", 100), list[str]()
    small = Held(budget, "b", "small", gone)
    crowd = [Held(budget, "a", f"crowd {number}", gone) for number in range(10)]
    small.hold(20)
    for each in crowd:
        each.hold(10)
    assert gone == ["crowd 0", "crowd 1"]
    crowd[2].hold(15)
    # Who has grown is as old as before, and may be the one.
    assert gone[2:] == ["crowd 2"]
    small.hold(95)
    assert gone[3:] == ["small"]
    assert budget.amount == 70
    for each in crowd:
        each.hold(0)
    assert budget.amount == 0
    assert not budget.evict()


def test_one_that_is_too_much_by_itself_gives_way() -> None:
    budget, gone = Budget("a bound", 100), list[str]()
    Held(budget, "a", "all", gone).hold(101)
    assert (gone, budget.amount) == (["all"], 0)
