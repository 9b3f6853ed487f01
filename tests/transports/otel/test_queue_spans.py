"""A job's way through a real broker, as a real collector has it."""

from __future__ import annotations

import itertools
import os

import trio

from tests.servers import SessionNats
from tests.transports.nats.brokers import PATIENT
from tests.transports.otel.collector import Received, open_collector
from trinamo.runtime.config.config import TracingConfig
from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.planes import QueueLimits
from trinamo.runtime.protocol.queue.consumer import Backoff
from trinamo.runtime.queues.consumer import ConsumerLimits, Job
from trinamo.runtime.queues.queues import Queues
from trinamo.runtime.traces.ring import Traces
from trinamo.runtime.traces.spans import Tracing
from trinamo.transports.nats import open_nats
from trinamo.transports.otel import open_spans

LIMITS = QueueLimits(visibility_timeout_s=60, attempts_max=2)
AT_ONCE = ConsumerLimits(backoff=Backoff(min_s=0))
_numbers = itertools.count()


async def test_put_wait_and_each_attempt_of_a_job_are_one_trace(nats_server: SessionNats) -> None:
    """Put here, taken there: two processes with a connection, and a way to the collector, each."""
    name = f"spans-{os.getpid()}-{next(_numbers)}"
    done = trio.Event()

    async def work(job: Job, _: bytes) -> None:
        with job.context.trace.begin("inner"):
            if job.attempt == 1:
                raise ValueError("the first time")
        done.set()

    env = RealEnv()
    with trio.fail_after(120), open_collector() as collector:
        section = TracingConfig(endpoint=collector.url, flush_timeout_s=60)
        async with (
            open_nats([nats_server.url], PATIENT) as here,
            open_nats([nats_server.url], PATIENT) as there,
            open_spans(section, {"role": "asks"}) as sent_here,
            open_spans(section, {"role": "works"}) as sent_there,
        ):
            asks = Traces(env.clock, 10, Tracing(sent_here, env, sample_ratio=1.0))
            works = Traces(env.clock, 10, Tracing(sent_there, env, sample_ratio=1.0))
            with Context("mine") as context:
                context.trace = asks.begin(context.id)
                async with Queues(here, env, traces=asks).open(name, limits=LIMITS) as queue:
                    with context.trace.begin("worker"):
                        await queue.put("job-1", b"", context=context)
            async with Queues(there, env, traces=works).consume(
                name, work, decode=bytes, queue_limits=LIMITS, limits=AT_ONCE
            ):
                await done.wait()
    spans = {(span.name, span.facts.get("trinamo.attempt")): span for span in collector.spans}
    assert {span.trace for span in collector.spans} == {spans["worker", None].trace}
    put, wait = spans["put", None], spans["wait", None]
    first, second = spans["job", 1], spans["job", 2]
    assert put.parent == spans["worker", None].id
    assert {wait.parent, first.parent, second.parent} == {put.id}
    inner = [span.parent for span in collector.spans if span.name == "inner"]
    assert sorted(inner) == sorted([first.id, second.id])
    assert (first.is_error, second.is_error, put.is_error) == (True, False, False)
    assert [role(put), role(wait), role(first)] == ["asks", "works", "works"]
    assert {span.facts["trinamo.request_id"] for span in collector.spans} == {"mine"}
    # One machine, so one clock. The wait is reckoned back from where the job arrived.
    assert put.start_ns <= wait.start_ns
    assert wait.end_ns <= first.end_ns <= second.start_ns


def role(span: Received) -> str:
    return span.process["trinamo.role"]
