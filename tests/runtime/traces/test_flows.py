"""The legs of a prompt that another worker computes, both ways."""

from __future__ import annotations

import pytest
import trio

from tests.runtime.disaggregation.serving import BLOCK_TOKENS, MODES, Served, open_workers, prompt
from trinamo.runtime.context import Context
from trinamo.runtime.traces.ring import LegView

LENGTH = 200
BLOCKS = LENGTH // BLOCK_TOKENS


async def legs_of(served: Served, request_id: str) -> dict[str, LegView]:
    """By name; once all have ended."""
    assert served.runtime is not None
    with trio.fail_after(120):
        while True:
            view = served.runtime.traces.find(request_id)
            legs = {leg.name: leg for trace in view.traces for leg in trace.legs}
            if legs and all(leg.end is not None for leg in legs.values()):
                return legs
            await trio.sleep(0.005)


def told(legs: dict[str, LegView]) -> dict[str, object]:
    return {name: leg.facts["outcome"] for name, leg in legs.items()}


@pytest.mark.parametrize("mode", MODES)
async def test_a_prompt_that_is_computed_elsewhere_has_legs_on_both_sides(mode: str) -> None:
    async with open_workers("decode", "prefill", disaggregation__mode=mode) as workers:
        with trio.fail_after(120):
            await workers.ask(prompt(LENGTH), Context("mine"))
        decode = await legs_of(workers.of("decode"), "mine")
        prefill = await legs_of(workers.of("prefill"), "mine")
    here = {"worker": "success", "remote_prefill": "success", "reservation": "adopted"}
    moved = prefill
    if mode == "decode_first":
        assert told(decode) == {**here, "queue": "success", "engine": "success"}
        assert told(prefill) == dict.fromkeys(("job", "attempt", "prefill", "transfer"), "success")
        assert decode["queue"].marks[0][0] == "put"
    else:
        more = dict.fromkeys(("attempt", "transfer", "engine"), "success")
        assert told(decode) == {**here, **more}
        assert told(prefill) == dict.fromkeys(("worker", "prefill"), "success")
        moved = decode
    assert moved["transfer"].facts["blocks"] == BLOCKS
    assert moved["transfer"].facts["backend"] == "tcp"
    assert decode["remote_prefill"].facts["blocks"] == BLOCKS
    assert decode["remote_prefill"].start <= moved["transfer"].start
