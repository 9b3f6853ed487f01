"""What the trace of a request says of its migration."""

from __future__ import annotations

from tests.runtime.caller.migration.test_migration import Counting, answer, lost, serve
from tests.runtime.endpoints import Cluster
from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.traces.ring import Traces


async def test_the_gap_between_two_workers_is_a_leg_of_the_trace(cluster: Cluster) -> None:
    traces, context = Traces(RealEnv().clock, 10), Context("1")
    context.trace = traces.begin("1")
    client = await serve(cluster, Counting(breaks=[(5, lost())]))
    await answer(client, context=context)
    (trace,) = traces.find("1").traces
    first, gap, second = trace.legs
    assert [(leg.name, leg.facts["outcome"]) for leg in trace.legs] == [
        ("attempt", "disconnected"),
        ("migration", "success"),
        ("attempt", "success"),
    ]
    assert gap.facts["delivered_tokens"] == 5
    assert gap.facts["left"] == first.facts["instance"]
    assert gap.facts["reason"] == "disconnected"
    assert gap.start <= second.start
