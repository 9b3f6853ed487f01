"""I1 and I2 of input: what workers took of it, against what clients sent.

An input may be cut off anywhere, and its worker then has a gapless part of it; but it must not take that
for the whole, which is what only the client's word says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..cluster.outcome import Outcome


def check(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """Items of input that are lost, repeated or out of order, and inputs that nobody completed."""
    sent: dict[str, int] = {}
    ended: set[str] = set()
    taken: dict[str, int] = {}
    for row in outcome.told:
        if row.kind == "caller.input":
            sent[row.field("request")] = row.field("index") + 1
        elif row.kind in ("caller.input_end", "caller.stop"):
            ended.add(row.field("request"))
        elif row.kind == "engine.input":
            request, attempt, index = (row.field(name) for name in ("request", "attempt", "index"))
            due = taken.get(attempt, 0)
            if index != due or index >= sent.get(request, 0):
                yield "I1", f"{request}: the worker took item {index} of its input, not {due}"
            taken[attempt] = index + 1
        elif row.kind == "engine.input_end":
            request, count = row.field("request"), taken.get(row.field("attempt"), 0)
            if request not in ended:
                yield "I2", f"{request}: {count} items passed for its input, which was cut off"
