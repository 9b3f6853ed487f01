"""I1 to I3: what clients were told, against what engines did; and what workers took of input, against what was sent.

The right answer is known without asking a worker (`engines/mocker/engine.py`), so a lost, repeated
or foreign token shows at once. What becomes of the legs of a request is in `legs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from trinamo.runtime.context import Reason
from trinamo.runtime.errors import DeadlineError

from ..cluster.members import DROPPED
from ..cluster.services import BROKER, STORE
from ..cluster.workload import COMPLETE, ClientRecord
from . import legs
from .legs import Attempt, attempts_of

if TYPE_CHECKING:
    from ..cluster.outcome import Outcome


TOKENS_AFTER_STOP_MAX: Final = 3
"""One in the step that is running, one it was about to hand out, one on its way to the note."""


TOKENS_ON_THE_WAY_MAX: Final = 12
"""The same as the caller sees it, with what is made while its Stop travels."""


_REASONS: Final = {
    "quit": (Reason.CLIENT_DISCONNECT.value,),
    DROPPED: (Reason.CONSUMER_DROPPED.value,),
    DeadlineError.code: (Reason.DEADLINE.value,),
}
"""What a worker may hear of a request, by how it ended at its client."""


def check(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """What is wrong with any request or any of its attempts."""
    attempts = attempts_of(outcome)
    stopped = {row.field("request") for row in outcome.told if row.kind == "caller.stop"}
    for record in outcome.cluster.records:
        yield from _check_items(record)
        yield from _check_end(outcome, record, has_stopped=record.name in stopped)
    yield from _check_progress(outcome)
    yield from _check_kills(outcome)
    yield from _check_stops(outcome)
    records = {r.name: r for r in outcome.cluster.records}
    yield from legs.check(outcome, attempts)
    yield from _check_reasons(outcome, attempts)
    yield from _check_inputs(outcome)
    for attempt in attempts:
        for text in attempt.wrong:
            yield "I3", f"{attempt.request}: {text}"
        if attempt.request in records:
            yield from _check_stop(attempt, records[attempt.request])


def _check_items(record: ClientRecord) -> Iterator[tuple[str, str]]:
    expected = record.expected
    if not expected.startswith(record.text):
        yield "I1", f"{record.name} got {record.text!r}, which is no beginning of {expected!r}"
    for index, text in record.others.items():
        if not expected.startswith(text):
            yield "I1", f"choice {index} of {record.name} is {text!r}, no beginning of {expected!r}"
    if record.late:
        yield "I1", f"{record.name} got {record.late} items after its end"


def _check_end(
    outcome: Outcome, record: ClientRecord, *, has_stopped: bool
) -> Iterator[tuple[str, str]]:
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
    if record.via == "http" and sorted(record.ended_choices) != list(range(record.profile.choices)):
        yield (
            "I2",
            f"{record.name} is called complete with ends of its choices {record.ended_choices}",
        )
    for index, text in record.others.items():
        if len(text) != len(record.expected):
            yield (
                "I2",
                f"choice {index} of {record.name} is called complete with {len(text)} tokens",
            )
    is_whole = len(record.text) == len(record.expected)
    # Only its own client asks for a part, and never over HTTP: one that wants no more leaves.
    if not (is_whole or has_stopped):
        yield (
            "I2",
            (
                f"{record.name} is called complete with {len(record.text)} of"
                f" {len(record.expected)} tokens"
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
    """From the caller's end: where nothing is broken a Stop is heard within two trips and a step."""
    records = {record.name: record for record in outcome.cluster.records}
    broken_s = _broken_s(outcome)
    for row in outcome.world.trace.of_kind("caller.stop"):
        record = records[row.field("request")]
        more = len(record.text) - row.field("tokens")
        is_whole = record.ended_s is not None and record.ended_s < broken_s
        if more > TOKENS_ON_THE_WAY_MAX and is_whole and not record.profile.is_slow:
            yield "I3", f"{record.name} got {more} tokens after its Stop"


def _check_stop(attempt: Attempt, record: ClientRecord) -> Iterator[tuple[str, str]]:
    if attempt.stopped_at is None or record.profile.is_slow:
        return
    more = attempt.tokens - attempt.stopped_at
    if more > TOKENS_AFTER_STOP_MAX:
        yield "I3", f"{attempt.request}: the engine made {more} tokens after Stop"


def _check_reasons(outcome: Outcome, attempts: list[Attempt]) -> Iterator[tuple[str, str]]:
    """Where nothing is broken a worker hears why its caller ended the request, in its words."""
    # A connection that breaks says nothing.
    broken_s = _broken_s(outcome)
    said = {record.name: {*_REASONS.get(record.outcome, ())} for record in outcome.cluster.records}
    for row in outcome.told:
        if row.kind in ("caller.stop", "caller.kill"):
            said[row.field("request")].add(row.field("reason"))
    for attempt in attempts:
        reasons = said.get(attempt.request)
        for reason in attempt.reasons if attempt.ended_s < broken_s else ():
            if reasons and reason not in reasons:
                yield (
                    "I3",
                    f"{attempt.request} ended for {sorted(reasons)}; its worker heard {reason}",
                )


def _broken_s(outcome: Outcome) -> float:
    """When the first fault struck that streams can feel: one of a store or a broker they cannot."""
    for row in outcome.told:
        if row.kind == "fault" and not {row.field("on"), row.field("to")} & {STORE, BROKER}:
            return row.time_s
    return math.inf


def _check_inputs(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """Items of input that are lost, repeated or out of order, and inputs that nobody completed.

    An input may be cut off anywhere, and its worker then has a gapless part of it; but it must not take
    that for the whole, which is what only the client's word says.
    """
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
