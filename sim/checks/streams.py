"""I1 to I4, and I11: what clients were told, against what engines did.

The right answer is known without asking a worker (`engines/mocker/engine.py`), so a lost, repeated
or foreign token shows at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import attrs

from ..cluster.workload import COMPLETE, RequestRecord
from ..core.policies import is_interleaved

if TYPE_CHECKING:
    from ..core.trace import Row
    from ..scenario.outcome import Outcome

__all__ = ["check"]

TOKENS_AFTER_STOP_MAX: Final = 3
"""One in the step that is running, one it was about to hand out, one on its way to the note."""


TOKENS_ON_THE_WAY_MAX: Final = 12
"""The same as the caller sees it, with what is made while its Stop travels."""


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
                self.stopped_at = self.tokens
                if self.killed_at_s is not None:
                    self.wrong.append("a Stop came through after the Kill, which it must not undo")
            case "engine.killed":
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


def check(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """What is wrong with any request or any of its attempts."""
    attempts = attempts_of(outcome)
    for record in outcome.cluster.records:
        yield from _check_items(record)
        yield from _check_end(outcome, record)
    yield from _check_progress(outcome)
    yield from _check_kills(outcome)
    yield from _check_stops(outcome)
    died_s = _deaths(outcome)
    ends_s = {r.name: _gone_s(r, died_s, outcome) for r in outcome.cluster.records}
    records = {r.name: r for r in outcome.cluster.records}
    yield from _check_migrations(attempts, records)
    for attempt in attempts:
        for text in attempt.wrong:
            yield "I3", f"{attempt.request}: {text}"
        if attempt.request in records:
            yield from _check_stop(attempt, records[attempt.request])
        yield from _check_idle(outcome, attempt, ends_s, died_s)
        yield from _check_queued(outcome, attempt, ends_s)


def _check_migrations(
    attempts: list[Attempt], records: dict[str, RequestRecord]
) -> Iterator[tuple[str, str]]:
    """A replay begins behind tokens that were made, and the client never sees where it was."""
    made: dict[str, int] = {}
    seeds: dict[str, str] = {}
    moved: set[str] = set()
    for attempt in attempts:
        name, known = attempt.request, made.get(attempt.request, 0)
        if attempt.index > known:
            yield "I11", f"{name} goes on behind token {attempt.index}, and {known} were made"
        if attempt.leg != "prefill":
            if attempt.index:
                moved.add(name)
                if attempt.seed != seeds[name]:
                    yield "I11", f"{name} goes on with seed {attempt.seed}, not {seeds[name]}"
            seeds.setdefault(name, attempt.seed)
            made[name] = max(known, attempt.index + attempt.tokens)
    for name in moved:
        record = records.get(name)
        if record is not None and not record.expected.startswith(record.text):
            yield "I11", f"{name} migrated, and got {record.text!r}, not {record.expected!r}"


def _check_queued(
    outcome: Outcome, attempt: Attempt, ends_s: dict[str, float]
) -> Iterator[tuple[str, str]]:
    """What still waited to be prefilled when its client had gone is never computed."""
    gone_s = ends_s.get(attempt.request, math.inf)
    late_s = attempt.began_s - gone_s
    if attempt.leg == "prefill" and late_s > outcome.scenario.limits.idle_s:
        yield (
            "I4",
            (
                f"{attempt.request} was over at {gone_s:.3f} s, but {attempt.host} began to prefill"
                f" it {late_s:.3f} s later"
            ),
        )


def _check_items(record: RequestRecord) -> Iterator[tuple[str, str]]:
    expected = record.expected
    if not expected.startswith(record.text):
        yield "I1", f"{record.name} got {record.text!r}, which is no beginning of {expected!r}"
    if record.late:
        yield "I1", f"{record.name} got {record.late} items after its end"


def _check_end(outcome: Outcome, record: RequestRecord) -> Iterator[tuple[str, str]]:
    is_alive = outcome.cluster.is_up(record.client) or record.ended_s is not None
    if len(record.terminals) > 1:
        yield "I2", f"{record.name} has the ends {record.terminals}"
    is_promised = not outcome.core or record.client in outcome.core
    if not record.terminals and is_alive and is_promised and outcome.load_ended_s is not None:
        yield "I2", f"{record.name} has no end"
    if record.outcome != COMPLETE:
        return
    if not record.finish_reason:
        yield "I2", f"{record.name} is called complete without a finish reason"
    is_whole = len(record.text) == record.output_tokens
    if record.finish_reason != "cancelled" and not is_whole:
        yield (
            "I2",
            (
                f"{record.name} is called complete with {len(record.text)} of"
                f" {record.output_tokens} tokens"
            ),
        )


def _check_progress(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """What begins when a core has been whole for long enough has no excuse."""
    after_s = outcome.scenario.liveness.whole_after_s
    if outcome.healed_s is None or after_s < 0:
        return
    for record in outcome.cluster.records:
        is_late = record.started_s >= outcome.healed_s + after_s
        if is_late and record.client in outcome.core and record.terminals != [COMPLETE]:
            yield (
                "I15",
                (
                    f"{record.name} began at {record.started_s:.3f} s, long after a core was healed,"
                    f" and ended with {record.terminals}"
                ),
            )


def _check_kills(outcome: Outcome) -> Iterator[tuple[str, str]]:
    killed: dict[str, int] = {}
    for row in outcome.told:
        if row.kind == "caller.kill":
            killed[row.field("request")] = row.field("tokens")
        elif row.kind == "stream.token" and row.field("request") in killed:
            yield "I3", f"{row.field('request')} got token {row.field('index')} after its Kill"
        elif row.kind == "caller.state":
            name, state = row.field("request"), row.field("state")
            if name in killed and state != "KILLED":
                yield "I3", f"the Kill of {name} became {state}"


def _check_stops(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """From the caller's end: without faults a Stop is heard within two trips and a step."""
    records = {record.name: record for record in outcome.cluster.records}
    for row in outcome.world.trace.of_kind("caller.stop"):
        record = records[row.field("request")]
        more = len(record.text) - row.field("tokens")
        is_slow = bool(record.profile.is_slow or outcome.scenario.faults)
        if more > TOKENS_ON_THE_WAY_MAX and not is_slow:
            yield "I3", f"{record.name} got {more} tokens after its Stop"


def _check_stop(attempt: Attempt, record: RequestRecord) -> Iterator[tuple[str, str]]:
    if attempt.stopped_at is None or record.profile.is_slow:
        return
    more = attempt.tokens - attempt.stopped_at
    if more > TOKENS_AFTER_STOP_MAX:
        yield "I3", f"{attempt.request}: the engine made {more} tokens after Stop"


def _deaths(outcome: Outcome) -> dict[str, float]:
    """When each incarnation was killed or lost its power."""
    return {
        f"{row.field('host')}.{row.field('generation')}": row.time_s
        for row in outcome.told
        if row.kind in ("kill", "power_off")
    }


def _gone_s(record: RequestRecord, died_s: dict[str, float], outcome: Outcome) -> float:
    """When the client had its end, or died."""
    if record.ended_s is not None:
        return record.ended_s
    generation = outcome.world.host(record.client).generation
    return died_s.get(f"{record.client}.{generation}", math.inf)


def _check_idle(
    outcome: Outcome, attempt: Attempt, ends_s: dict[str, float], died_s: dict[str, float]
) -> Iterator[tuple[str, str]]:
    gone_s = ends_s.get(attempt.request, math.inf)
    bound_s = outcome.scenario.limits.idle_s
    # A leg that began after the client had gone has its bound from there on.
    due_s = max(gone_s, attempt.began_s) + bound_s
    ended_s = min(attempt.ended_s, died_s.get(attempt.host, math.inf))
    is_over = outcome.world.ended_s >= due_s or math.isfinite(ended_s)
    if not math.isinf(gone_s) and is_over and ended_s > due_s and not _was_still(outcome, attempt):
        yield (
            "I4",
            (
                f"{attempt.request} was over at {gone_s:.3f} s, but {attempt.host} worked on it until"
                f" {ended_s:.3f} s"
            ),
        )


def _was_still(outcome: Outcome, attempt: Attempt) -> bool:
    """Whether the worker was paused for ever, so that it cannot have done anything."""
    host = attempt.host.partition(".")[0]
    return bool(outcome.core) and host not in outcome.core and not outcome.cluster.is_up(host)
