"""I4 and I11: the legs of a request end with it, and what another worker takes up goes on without a seam.

An attempt at a prompt, at an answer, or at what is left of one is a leg; so is a job that waits in a
queue.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import attrs

from ..core.policies import is_interleaved

if TYPE_CHECKING:
    from ..cluster.outcome import Outcome
    from ..cluster.workload import ClientRecord
    from ..core.trace import Row


_CHOICE: Final = re.compile(r"\.(\d{1,3})(?:\.[0-9a-f]{8})+$")
"""In the id of an attempt, behind that of the request (`http/choices.py`, `attempt_id`); what a decode
worker asks of a prefill worker is an attempt of its own attempt."""
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
    choice: str = ""
    """Which of several choices of one answer; empty where there is one."""
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
            numbered = _CHOICE.search(leg[1])
            choice = "" if numbered is None else numbered[1]
            attempt = Attempt(name, row.host, leg[2], row.time_s, index, seed, choice, on_the_way_s)
            open_now[leg] = attempt
            found.append(attempt)
        else:
            open_now[leg].take(row)
    return found


_DEATHS: Final = ("kill", "power_off")


def check(outcome: Outcome, attempts: list[Attempt]) -> Iterator[tuple[str, str]]:
    """What is wrong with any leg of any request."""
    # When each incarnation was killed or lost its power; that of what is dead changes nothing.
    died_s = {
        f"{row.field('host')}.{row.field('generation')}": row.time_s
        for row in reversed(outcome.told)
        if row.kind in _DEATHS
    }
    still = _stills(outcome)
    records = {record.name: record for record in outcome.cluster.records}
    ends_s = {name: _gone_s(record, died_s, outcome) for name, record in records.items()}
    yield from _check_migrations(attempts, records)
    for attempt in attempts:
        gone_s = ends_s.get(attempt.request, math.inf)
        yield from _check_leg(outcome, attempt, gone_s, died_s, still.get(attempt.host, ()))


def _check_migrations(
    attempts: list[Attempt], records: dict[str, ClientRecord]
) -> Iterator[tuple[str, str]]:
    """A replay begins behind tokens that were made, and the client never sees where it was."""
    made: dict[tuple[str, str], int] = {}
    seeds: dict[tuple[str, str], str] = {}
    moved: set[str] = set()
    for attempt in attempts:
        name, answer = attempt.request, (attempt.request, attempt.choice)
        known = made.get(answer, 0)
        if attempt.index > known:
            yield "I11", f"{name} goes on behind token {attempt.index}, and {known} were made"
        if attempt.leg != "prefill":
            if attempt.index:
                moved.add(name)
                # No request of a load is greedy, so each draws from a seed.
                if attempt.seed == "None" or attempt.seed != seeds[answer]:
                    yield "I11", f"{name} goes on with seed {attempt.seed}, not {seeds[answer]}"
            seeds.setdefault(answer, attempt.seed)
            made[answer] = max(known, attempt.index + attempt.tokens)
    for name in moved:
        record = records.get(name)
        if record is not None and not record.expected.startswith(record.text):
            yield "I11", f"{name} migrated, and got {record.text!r}, not {record.expected!r}"


def _gone_s(record: ClientRecord, died_s: dict[str, float], outcome: Outcome) -> float:
    """When the client had its end, or died."""
    if record.ended_s is not None:
        return record.ended_s
    generation = outcome.world.host(record.client).generation
    return died_s.get(f"{record.client}.{generation}", math.inf)


def _check_leg(
    outcome: Outcome,
    attempt: Attempt,
    gone_s: float,
    died_s: dict[str, float],
    still: Iterable[tuple[float, float]],
) -> Iterator[tuple[str, str]]:
    # A leg that began after the client had gone has its bound from there on.
    due_s = _due_s(outcome, max(gone_s, attempt.began_s), still)
    ended_s = min(attempt.ended_s, died_s.get(attempt.host, math.inf))
    is_over = outcome.world.ended_s >= due_s or math.isfinite(ended_s)
    over = f"{attempt.request} was over at {gone_s:.3f} s"
    if not math.isinf(gone_s) and is_over and ended_s > due_s:
        yield "I4", f"{over}, but {attempt.host} worked on it until {ended_s:.3f} s"
    # What still waited to be prefilled, or to be taken up, when its client had gone never is.
    is_waiting = attempt.leg == "prefill" or attempt.index > 0
    if is_waiting and attempt.began_s > _due_s(outcome, gone_s, still):
        late_s = attempt.began_s - gone_s
        yield "I4", f"{over}, and {attempt.host} took it up {late_s:.3f} s later"


def _due_s(outcome: Outcome, since_s: float, still: Iterable[tuple[float, float]]) -> float:
    """When a process must have heard of what happened; while it is stopped it hears nothing."""
    due_s = since_s + outcome.scenario.limits.idle_s
    for began_s, ended_s in still:
        if began_s <= due_s:
            due_s += max(0.0, ended_s - max(began_s, since_s))
    return due_s


def _stills(outcome: Outcome) -> dict[str, list[tuple[float, float]]]:
    """When each incarnation was paused, from when to when."""
    found: dict[str, list[tuple[float, float]]] = {}
    generations: dict[str, int] = {}
    for row in outcome.told:
        if row.kind == "boot":
            generations[row.field("host")] = row.field("generation")
        elif row.kind in ("pause", "resume", *_DEATHS):
            host = row.field("host")
            spans = found.setdefault(f"{host}.{generations.get(host, 0)}", [])
            if row.kind == "pause":
                spans.append((row.time_s, math.inf))
            elif spans:
                spans[-1] = (spans[-1][0], min(spans[-1][1], row.time_s))
    return found
