"""What engines did with requests: every attempt, from the notes of `cluster/engines.py`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import attrs

from ..core.policies import is_interleaved

if TYPE_CHECKING:
    from ..cluster.outcome import Outcome
    from ..core.trace import Row


HEARD_S: Final = 0.005
"""Within how long the protocol has a Kill heard; time passes between steps where they are interleaved."""


@attrs.define
class Attempt:
    """One request at one engine."""

    request: str
    host: str
    leg: str
    began_s: float
    index: int
    """Of its first token in the answer: how many the client had already."""
    seed: str
    on_the_way_s: float = 0.0
    """How long after a Kill a token may come that was made before."""
    ended_s: float = math.inf
    stopped_at: int | None = None
    killed_at_s: float | None = None
    reasons: list[str] = attrs.Factory(list)
    """Why it was stopped, killed, or both, as the worker was told."""
    tokens: int = 0
    wrong: list[str] = attrs.Factory(list)

    def take(self, row: Row) -> None:
        """One note about it."""
        match row.kind:
            case "engine.token":
                self.tokens += 1
                killed_s = self.killed_at_s
                if killed_s is not None and row.time_s > killed_s + self.on_the_way_s:
                    self.wrong.append(f"token {row.field('index')} was made after a Kill")
            case "engine.stopped":
                self.reasons.append(row.field("reason"))
                self.stopped_at = self.tokens
                if self.killed_at_s is not None:
                    self.wrong.append("a Stop came through after the Kill, which it must not undo")
            case "engine.killed":
                self.reasons.append(row.field("reason"))
                self.killed_at_s = row.time_s
            case "engine.end":
                self.ended_s = row.time_s
            case _:
                pass


def attempts_of(outcome: Outcome) -> list[Attempt]:
    """Every attempt an engine began, in order."""
    found: list[Attempt] = []
    open_now: dict[tuple[str, str, str], Attempt] = {}
    on_the_way_s = HEARD_S if is_interleaved(outcome.world.policy) else 0.0
    for row in outcome.told:
        if not row.kind.startswith("engine."):
            continue
        leg = (row.host, row.field("attempt"), row.field("leg"))
        if row.kind == "engine.begin":
            name, index, seed = (row.field(field) for field in ("request", "index", "seed"))
            attempt = Attempt(name, row.host, leg[2], row.time_s, index, seed, on_the_way_s)
            open_now[leg] = attempt
            found.append(attempt)
        else:
            open_now[leg].take(row)
    return found
