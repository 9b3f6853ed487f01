"""The invariants, each a function from what a run left behind to what is wrong with it.

`INVARIANTS` says what each means in words. Most read the notes of the trace; the census looks at
the living processes while the run is still going (`census.py`), the watches and reports at its end
(`events.py`), so those are called by the driver. What this package does not do: play the run
(`../scenario.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from . import blocks, census, events, expectations, leases, streams

if TYPE_CHECKING:
    from ..cluster.outcome import Outcome


INVARIANTS: Final = {
    "I1": "a client's tokens, and a worker's input, are a gapless prefix; nothing follows the end",
    "I2": "every request has exactly one end; only a whole answer, or input, passes for complete",
    "I3": "after Stop at most the queued tokens and one more step; after Kill none; Kill stays",
    "I4": "once the client is gone every leg of its request is idle within a bound",
    "I5": "at quiescence no request, stream, subject, block or task is left",
    "I6": "a lease ends at its TTL on the store's clock, its keys with it; only the living renew",
    "I7": "no two live incarnations own an instance id, and incarnations only count up",
    "I8": "a job has one effect and one ack; it comes again only if the first could not be told",
    "I9": "a KV block has one user; none is read before it came, or reused while it may be moved",
    "I10": "after quiescence routers know the loads and blocks of workers; a gap led to a snapshot",
    "I11": "migration repeats no token and loses none; a replay begins where the last one was told",
    "I12": "no buffer and no table is ever above its bound",
    "I13": "a watch loses no change, and revisions never go back",
    "I15": "every accepted request ends within its bound, and every process shuts down in its",
    "I16": "gauges are back at zero at quiescence",
    "crash": "no process ends by an exception",
    "expected": "the run shows what its scenario is about, and no other end than it allows",
}
"""What each means. `Expect.invariants` of a scenario holds keys of this table."""

CHECKS: Final[tuple[Callable[[Outcome], Iterator[tuple[str, str]]], ...]] = (
    streams.check,
    leases.check,
    events.check,
    census.check,
    blocks.check,
    expectations.check,
)


def judge(outcome: Outcome) -> None:
    """Add what every checker finds to the outcome; keep only what the scenario asks about."""
    for check in CHECKS:
        for invariant, text in check(outcome):
            outcome.violate(invariant, text)
    asked = outcome.scenario.expect.invariants
    if asked:
        outcome.violations[:] = [v for v in outcome.violations if v.invariant in asked]
