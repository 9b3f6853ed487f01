"""The engine of a decode worker, over a way to prefill workers that does what the test says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import msgspec
import pytest

from tests.runtime.disaggregation.serving import BLOCK_TOKENS, alone, make_engine, prompt, tokens
from tests.runtime.engines.loop.hosting import Gathering
from trinamo.runtime.caller.router import Router
from trinamo.runtime.context import Context
from trinamo.runtime.disaggregation.engine import (
    DisaggregatedEngine,
    DisaggregationLimits,
    Filled,
    Lending,
)
from trinamo.runtime.disaggregation.metrics import DecodeMetrics
from trinamo.runtime.engines.handoff import Prompt
from trinamo.runtime.engines.loop.host import EngineHost, open_engine_host
from trinamo.runtime.env import RealEnv
from trinamo.runtime.metrics.tallies import Registry
from trinamo.runtime.protocol.disaggregation.decision import PrefillReason
from trinamo.runtime.protocol.openai.generate import FinishReason, GenerateRequest


class StopsAtTheEnd:
    """A way on which the request is stopped in the moment in which its last block arrives."""

    mode = "decode_first"
    is_reachable = True
    depth = 0

    def __init__(self, host: EngineHost, share: float = 1.0) -> None:
        self._host = host
        assert host.kv is not None
        self.lending = Lending(host.kv.pool, block_tokens=BLOCK_TOKENS, share=share)

    def has_live(self) -> bool:
        return True

    @asynccontextmanager
    async def filled(
        self, request: GenerateRequest, prompt: Prompt, context: Context
    ) -> AsyncIterator[Filled]:
        async with self._host.reserve(request, context) as reservation:
            context.stop()
            yield Filled(reservation, 97, len(reservation.block_ids))


def over(host: EngineHost, share: float = 1.0) -> tuple[DisaggregatedEngine, DecodeMetrics]:
    env, flow = RealEnv(), StopsAtTheEnd(host, share)
    metrics = DecodeMetrics(Registry(), env.clock, flow.mode)
    engine = DisaggregatedEngine(
        host,
        flow,
        cast("Router", flow),
        lambda: DisaggregationLimits(tokens_local_max=0, queue_depth_max=1),
        env,
        metrics,
    )
    return engine, metrics


async def test_a_stop_that_comes_with_the_last_block_ends_the_answer_as_cancelled() -> None:
    """Nothing is awaited between the last block and the answer, so nobody else would see it."""
    async with open_engine_host(make_engine()) as host:
        engine, metrics = over(host)
        sink = Gathering()
        await engine.forward(prompt(100), Context("r"), sink)

    assert sink.deltas[-1].finish_reason is FinishReason.STOP
    assert metrics.counts == {PrefillReason.STOPPED: 1}


async def test_a_request_that_was_stopped_before_is_counted_as_that_and_asked_of_nobody() -> None:
    async with open_engine_host(make_engine()) as host:
        engine, metrics = over(host)
        sink, context = Gathering(), Context("r")
        context.stop()
        await engine.forward(prompt(100), context, sink)

    assert sink.deltas[-1].finish_reason is FinishReason.STOP
    assert metrics.counts == {PrefillReason.STOPPED: 1}


@pytest.mark.parametrize("kept", [12, 5])
async def test_an_answer_that_was_delivered_whole_is_ended_here(kept: int) -> None:
    """By its length, or by a stop string: there is nothing left that anybody could compute."""
    request = prompt(100)
    delivered = (await alone(request))[:kept]
    whole = msgspec.structs.replace(request, delivered_ids=delivered)
    if kept < 12:
        stop = bytes(token for token in delivered if token < 256).decode("utf-8", "replace")[-1:]
        whole = msgspec.structs.replace(whole, stop=[stop])
    async with open_engine_host(make_engine()) as host:
        engine, metrics = over(host)
        sink = Gathering()
        await engine.forward(whole, Context("r"), sink)

    reason = FinishReason.LENGTH if kept == 12 else FinishReason.STOP
    assert [delta.finish_reason for delta in sink.deltas] == [reason]
    assert tokens(sink.deltas) == []
    assert metrics.counts == {PrefillReason.SHORT_PROMPT: 1}
