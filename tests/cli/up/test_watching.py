"""The figures in the table of `trinamo up`."""

from __future__ import annotations

import trio
import trio.testing

from trinamo.cli.up.watching import _row
from trinamo.runtime.view.facts import Rates

WORKER = {
    "trinamo_worker_requests_in_flight": 3.0,
    "trinamo_worker_items_total": 0.0,
    "trinamo_engine_prompt_tokens_total": 10_000.0,
    "trinamo_engine_completion_tokens_total": 500.0,
}


async def test_a_worker_s_tokens_are_those_its_engine_has_generated_so_far(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Before: items of answers that had ended, 0 under long ones while the frontend showed 903."""
    rates = Rates()
    _row("worker-1", 0, "ready", "", WORKER, rates)
    await trio.sleep(2)
    later = {**WORKER, "trinamo_engine_completion_tokens_total": 2300.0}

    row = _row("worker-1", 0, "ready", "", later, rates)

    assert (row.tokens_per_s, row.in_flight) == (900.0, 3.0)
