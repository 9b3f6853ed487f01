"""Legs as spans: whose child each one is, here and in other processes."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from tests.runtime.disaggregation.serving import MODES, Served, open_workers, prompt
from tests.runtime.one_process import OneProcess, open_process
from tests.runtime.traces.test_legs import open_cluster
from tests.transports.tcp.ends import eventually
from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.planes import JobOrigin, LeasedJob, QueueLimits
from trinamo.runtime.process.runtime import Runtime
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.queue.consumer import Backoff
from trinamo.runtime.protocol.traceparent import decode_traceparent
from trinamo.runtime.queues.consumer import ConsumerLimits, Job
from trinamo.runtime.traces.ring import Traces
from trinamo.runtime.traces.spans import Span, Tracing

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ASKED = f"00-{TRACE}-{SPAN}-01"
WORDS = EndpointName("ns", "words", "count")


QUEUE = QueueLimits(visibility_timeout_s=10, attempts_max=3)
AT_ONCE = ConsumerLimits(backoff=Backoff(min_s=0))


class Kept:
    """A sink that keeps what it takes."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def take(self, span: Span) -> None:
        self.spans.append(span)


def traces(kept: Kept, ratio: float = 1.0, *, requests_max: int = 0) -> Traces:
    env = RealEnv()
    return Traces(env.clock, requests_max, Tracing(kept, env, sample_ratio=ratio))


def check_tree(spans: Sequence[Span], *, root: int = 0) -> None:
    """One trace, in which every span but one is the child of another, and nobody his own parent."""
    assert len({span.trace_id for span in spans}) == 1
    ids = {span.span_id for span in spans}
    assert len(ids) == len(spans)
    outside = [span for span in spans if span.parent_id not in ids]
    assert [span.parent_id for span in outside] == [root]


# --- one process ----------------------------------------------------------------------------------


async def test_the_first_leg_is_its_caller_s_child_and_the_others_are_its_children() -> None:
    kept = Kept()
    trace = traces(kept).begin("mine", ASKED)
    assert trace.traceparent == ASKED
    with trace.begin("worker"), trace.begin("engine") as leg:
        leg.mark("first_token")
        leg.tell(tokens=3)
    engine, worker = kept.spans
    assert (f"{worker.trace_id:032x}", f"{worker.parent_id:016x}") == (TRACE, SPAN)
    assert (engine.parent_id, engine.trace_id) == (worker.span_id, worker.trace_id)
    assert (engine.facts, [name for name, _ in engine.marks]) == (
        {"tokens": 3, "outcome": "success"},
        ["first_token"],
    )
    assert worker.start <= engine.start <= engine.end <= worker.end
    told = decode_traceparent(trace.traceparent)
    assert told is not None
    assert (told.trace_id, told.span_id) == (worker.trace_id, worker.span_id)


@pytest.mark.parametrize("said", ["", "no traceparent at all", ASKED.replace("01", "zz")])
async def test_a_request_of_nobody_begins_a_trace(said: str) -> None:
    kept = Kept()
    kept_traces = traces(kept)
    for _ in range(2):
        kept_traces.begin("mine", said).begin("http").finish()
    assert [span.parent_id for span in kept.spans] == [0, 0]
    assert len({span.trace_id for span in kept.spans}) == 2


async def test_a_span_goes_out_once_and_with_the_first_outcome() -> None:
    kept = Kept()
    leg = traces(kept).begin("mine").begin("http")
    leg.finish("overloaded")
    leg.finish()
    assert [span.facts["outcome"] for span in kept.spans] == ["overloaded"]


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
async def test_as_many_traces_are_kept_as_the_ratio_says(ratio: float) -> None:
    kept, count = Kept(), 2000
    kept_traces = traces(kept, ratio)
    for _ in range(count):
        kept_traces.begin("mine").begin("http").finish()
    # Six standard deviations.
    assert abs(len(kept.spans) - ratio * count) <= 6 * math.sqrt(count * ratio * (1 - ratio))


async def test_who_asks_decides_whether_a_trace_is_kept_and_says_so_to_all_below() -> None:
    kept = Kept()
    trace = traces(kept, 1.0).begin("mine", ASKED.removesuffix("01") + "00")
    trace.begin("worker").finish()
    assert kept.spans == []
    assert trace.traceparent.endswith("-00")
    trace = traces(kept, 0.0).begin("mine", ASKED)
    trace.begin("worker").finish()
    assert [f"{span.trace_id:032x}" for span in kept.spans] == [TRACE]


async def test_where_nobody_traces_only_the_caller_s_own_travels_on() -> None:
    env = RealEnv()
    for requests_max in (0, 10):
        trace = Traces(env.clock, requests_max).begin("mine", ASKED)
        with trace.begin("worker") as leg:
            assert (trace.traceparent, leg.traceparent) == (ASKED, "")


# --- several --------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(planes: OneProcess) -> AsyncIterator[tuple[Runtime, Runtime, list[Context]]]:
    """A worker that says whose request it has, and a caller."""
    contexts: list[Context] = []

    async def count(words: str, context: Context) -> int:
        contexts.append(context)
        return len(words.split())

    async with (
        open_process(planes, serving=True, tracing__enabled=True) as worker,
        open_process(planes, tracing__enabled=True) as caller,
    ):
        await worker.serve_unary(WORDS, count)
        yield worker, caller, contexts


async def test_a_unary_request_has_a_span_at_either_end_and_one_for_each_attempt() -> None:
    planes = OneProcess()
    async with serving(planes) as (worker, caller, contexts):
        client = await caller.client(WORDS)
        assert await client.call("two words", int) == 2
        request_id = contexts[0].id
        assert contexts[0].traceparent
        for runtime, names in ((caller, ["caller", "attempt"]), (worker, ["worker"])):
            (view,) = runtime.traces.find(request_id).traces
            assert [leg.name for leg in view.legs] == names
    assert sorted(span.name for span in planes.spans) == ["attempt", "caller", "worker"]
    check_tree(planes.spans)


async def test_the_attempts_at_a_job_are_found_by_its_id() -> None:
    planes = OneProcess()
    done = trio.Event()

    async def work(job: LeasedJob, _: bytes) -> None:
        if job.attempt == 1:
            raise ValueError("the first time")
        done.set()

    async with open_process(planes, serving=True, tracing__enabled=True) as runtime:
        async with runtime.queues.consume(
            "jobs", work, decode=bytes, queue_limits=QUEUE, limits=AT_ONCE
        ):
            async with runtime.queues.open("jobs") as queue:
                await queue.put("job-1", b"")
                with trio.fail_after(120):
                    await done.wait()
            legs = runtime.traces.find("job-1")
        await eventually(lambda: len(planes.spans) == 4)
    assert [view.legs[0].name for view in legs.traces] == ["put", "job", "job"]
    assert [view.legs[0].facts.get("attempt") for view in legs.traces] == [None, 1, 2]
    ended = [(span.name, span.facts["outcome"]) for span in planes.spans if span.name == "job"]
    assert ended == [("job", "failed"), ("job", "success")]
    # The second attempt waited while the first was made.
    assert sorted(span.name for span in planes.spans) == ["job", "job", "put", "wait"]
    check_tree(planes.spans)


async def test_a_job_that_a_request_puts_and_what_its_handler_asks_are_of_one_trace() -> None:
    planes = OneProcess()
    contexts: list[Context] = []

    async with serving(planes) as (worker, caller, asked):
        client = await caller.client(WORDS)

        async def work(job: Job, words: str) -> None:
            contexts.append(job.context)
            await client.call(words, int, context=job.context)

        async with caller.queues.consume(
            "jobs", work, decode=bytes.decode, queue_limits=QUEUE, limits=AT_ONCE
        ):
            with Context("mine-0123456789abcdef") as context:
                context.trace = worker.traces.begin(context.id, ASKED)
                with context.trace.begin("worker"):
                    async with worker.queues.open("jobs") as queue:
                        await queue.put("job-1", b"two words", context=context)
            await eventually(lambda: "job" in {span.name for span in planes.spans})
            by_request = caller.traces.find("mine").traces
            by_job = caller.traces.find("job-1").traces
    legs = ["job", "wait", "attempt"]
    for views in (by_request, by_job):
        assert [[leg.name for leg in view.legs] for view in views] == [legs]
    assert contexts[0].id == "mine-0123456789abcdef"
    assert asked[0].id.startswith(contexts[0].id)
    spans = {span.name: span for span in planes.spans if span.request_id != asked[0].id}
    assert sorted(spans) == ["attempt", "job", "put", "wait", "worker"]
    assert spans["job"].parent_id == spans["wait"].parent_id == spans["put"].span_id
    assert f"{spans['job'].span_id:016x}" in contexts[0].traceparent
    assert spans["wait"].end <= spans["job"].end
    check_tree(planes.spans, root=int(SPAN, 16))


async def test_a_job_carries_its_caller_s_context_also_where_nobody_traces() -> None:
    planes = OneProcess()
    told: list[str] = []
    done = trio.Event()

    async def work(job: Job, _: bytes) -> None:
        told.append(job.context.traceparent)
        done.set()

    async with (
        open_process(planes) as runtime,
        runtime.queues.open("jobs", limits=QUEUE) as queue,
        runtime.queues.consume("jobs", work, decode=bytes),
    ):
        await queue.put("job-1", b"", origin=JobOrigin(traceparent=ASKED, request_id="mine"))
        with trio.fail_after(120):
            await done.wait()
    assert told == [ASKED]


def open_legs(served: Served) -> list[str]:
    """Of the request, at one worker; it has some at both."""
    assert served.runtime is not None
    found = served.runtime.traces.find("mine").traces
    legs = [leg for view in found for leg in view.legs]
    return [leg.name for leg in legs if leg.end is None] if legs else ["none"]


@pytest.mark.parametrize("mode", MODES)
async def test_one_trace_crosses_queue_prefill_transfer_and_decode(mode: str) -> None:
    settings: dict[str, Any] = {"disaggregation__mode": mode, "tracing__enabled": True}
    async with open_workers("decode", "prefill", **settings) as workers:
        with trio.fail_after(120):
            await workers.ask(prompt(200), Context("mine"))
            await eventually(lambda: not any(open_legs(each) for each in workers.all))
    spans = workers.transports.spans
    check_tree(spans)
    names = {span.name for span in spans}
    assert names >= {"worker", "remote_prefill", "transfer", "prefill", "engine"}
    assert ("queue" in names, "job" in names) == (
        (True, True) if mode == MODES[0] else (False, False)
    )


async def test_a_client_s_traceparent_is_the_parent_of_all() -> None:
    async with open_cluster(tracing__enabled=True) as cluster:
        answer = await cluster.ask("mine", {"traceparent": ASKED})
        assert answer.status_code == 200
        await eventually(lambda: len(cluster.transports.spans) == 4)
    assert sorted(span.name for span in cluster.transports.spans) == [
        "attempt",
        "engine",
        "http",
        "worker",
    ]
    assert f"{cluster.transports.spans[0].trace_id:032x}" == TRACE
    check_tree(cluster.transports.spans, root=int(SPAN, 16))
