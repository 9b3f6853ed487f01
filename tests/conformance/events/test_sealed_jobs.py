"""Jobs on a broker to which somebody has the token, and not the cluster's secret."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import get_args

import attrs
import pytest
import trio

from tests.transports.nats.brokers import Broker
from trinamo.conformance.control import until
from trinamo.conformance.events import fresh_subject
from trinamo.runtime.planes import (
    CountsEvents,
    EventPlane,
    JobOrigin,
    PutResult,
    QueueLimits,
    Settlement,
    WorkQueue,
)
from trinamo.runtime.queues.queues import Queues
from trinamo.transports.nats.queue.records import Record, RecordState, StreamNames, encode_record
from trinamo.transports.security.sealing import HEAD_BYTES, Sealer

from .conftest import NATS
from .test_consumer import SeededEnv

pytestmark = pytest.mark.parametrize("broker", ["simulated", NATS], indirect=True)
SECRET = bytes(range(32))
PROMPT = b"the prompt of somebody"


@attrs.frozen
class Ends:
    """A member that puts, one that takes, and a stranger with the broker's token."""

    ours: WorkQueue
    theirs: WorkQueue
    taker: EventPlane
    stranger: EventPlane
    names: StreamNames

    async def forge(self, job_id: str, payload: bytes) -> None:
        """Put a message where jobs are, as only the broker's token allows."""
        await self.store(self.names.job_subject(job_id), payload)

    async def store(self, subject: str, payload: bytes) -> None:
        reply = await self.stranger.request(subject, payload, timeout_s=60)
        assert b'"seq"' in reply.payload

    @property
    def refused(self) -> int:
        assert isinstance(self.taker, CountsEvents)
        return self.taker.statistics().refused_incoming


@asynccontextmanager
async def opened(broker: Broker) -> AsyncIterator[Ends]:
    name = f"sealed-{fresh_subject().rpartition('.')[2]}"
    limits = QueueLimits(duplicate_window_s=0.2, attempts_max=2)
    with trio.fail_after(120):
        async with (
            broker.connect(SECRET) as one,
            broker.connect(SECRET) as other,
            broker.connect() as stranger,
            one.work_queue(name, limits=limits) as ours,
            other.work_queue(name) as theirs,
        ):
            yield Ends(ours, theirs, other, stranger, StreamNames(name))


async def test_a_tap_reads_no_job_wherever_it_is(broker: Broker) -> None:
    said: list[bytes] = []
    async with opened(broker) as ends, ends.stranger.subscribe(">") as tap:
        assert await ends.ours.put("a", PROMPT) is PutResult.ADDED
        for _ in range(2):
            job = await ends.theirs.take(wait_s=60)
            assert job is not None
            assert job.payload == PROMPT
            await ends.theirs.nak(job, reason=f"cannot: {PROMPT.decode()}")
        # Dead, and a job once more; who shows dead letters is a member.
        letter = await ends.ours.dead_letter("a")
        assert letter is not None
        assert (letter.payload, letter.reason) == (PROMPT, f"cannot: {PROMPT.decode()}")
        assert await ends.ours.requeue("a")
        job = await ends.theirs.take(wait_s=60)
        assert job is not None
        assert job.payload == PROMPT
        await ends.stranger.publish("the.end", b"")
        async for message in tap:
            said.append(message.payload)
            if message.subject == "the.end":
                break
        async with ends.stranger.work_queue(ends.names.queue) as queue:
            assert await queue.dead_letters() == []
    assert len(said) > 10
    assert not any(b"prompt" in each or b'"attempt"' in each for each in said)


async def test_a_job_that_no_member_put_so_is_refused_counted_and_kept_for_people(
    broker: Broker,
) -> None:
    async with opened(broker) as ends:
        subject = ends.names.job_subject("a")
        async with ends.stranger.subscribe(subject) as tap:
            await ends.ours.put("a", PROMPT)
            sealed = (await anext(tap)).payload
        job = await ends.theirs.take(wait_s=60)
        assert job is not None
        await ends.theirs.ack(job)
        own = Sealer([bytes(32)], random.Random(1))
        about = f"job {ends.names.queue} f2  ".encode()
        forged = {
            "f1": PROMPT,
            "f2": own.seal(PROMPT, about),
            # Another's, and changed.
            "f3": sealed,
            "f4": sealed[:HEAD_BYTES] + bytes([sealed[HEAD_BYTES] ^ 1]) + sealed[HEAD_BYTES + 1 :],
            "f5": b"",
        }
        for job_id, payload in forged.items():
            await ends.forge(job_id, payload)
        await ends.ours.put("b", PROMPT)
        job = await ends.theirs.take(wait_s=60)
        assert job is not None
        assert (job.id, job.payload) == ("b", PROMPT), "and no other"
        assert await ends.theirs.take(wait_s=0) is None
        assert ends.refused == len(forged)
        letters = await ends.ours.dead_letters()
        assert [each.id for each in letters] == list(forged)
        assert all("secret_file" in each.reason for each in letters)
        assert [each.payload for each in letters] == list(forged.values())


async def test_a_job_is_for_whom_it_was_put_and_no_other(broker: Broker) -> None:
    """What is said of a job beside its payload is changed with it, or not at all."""
    async with opened(broker) as ends:
        subject = ends.names.job_subject("a")
        origin = JobOrigin(request_id="of-a-request")
        async with ends.stranger.subscribe(subject) as tap:
            await ends.ours.put("a", PROMPT, origin=origin)
            sealed = (await anext(tap)).payload
        job = await ends.theirs.take(wait_s=60)
        assert job is not None
        assert job.origin == origin
        await ends.theirs.ack(job)
        await trio.sleep(0.3)  # The id is forgotten.
        await ends.forge("a", sealed)
        while not ends.refused:
            assert await ends.theirs.take(wait_s=0.2) is None
        assert ends.refused == 1


async def test_a_consumer_never_sees_a_forged_job(broker: Broker) -> None:
    seen: list[bytes] = []

    async def handle(_: object, payload: bytes) -> None:
        seen.append(payload)

    async with opened(broker) as ends:
        queues = Queues(ends.taker, SeededEnv())
        async with queues.consume(ends.names.queue, handle, decode=bytes) as consumer:
            await ends.forge("f", PROMPT)
            await ends.ours.put("a", b"ours")
            await until(lambda: seen == [b"ours"] and ends.refused == 1)
            assert consumer.counts.taken == 1


@pytest.mark.parametrize("state", get_args(RecordState))
async def test_who_has_the_token_loses_records_of_jobs_and_forges_none(
    broker: Broker, state: RecordState
) -> None:
    """A job is done by whoever took it, and else comes again, whatever somebody says how far it is."""
    async with opened(broker) as ends:
        lease = ends.names.lease_subject
        for job_id in ("a", "b"):
            await ends.ours.put(job_id, PROMPT)
        async with ends.stranger.subscribe(lease("a")) as tap:
            job = await ends.theirs.take(wait_s=60)
            assert job is not None
            assert (job.id, await ends.theirs.ack(job)) == ("a", Settlement.APPLIED)
            records = [await anext(tap) for _ in range(2)]
        forged = Record(state=state, job=2, attempt=7, token="x", put_ns=1)
        for payload in (encode_record(forged), records[-1].payload, b""):
            await ends.store(lease("b"), payload)
            job = await ends.theirs.take(wait_s=60)
            assert job is not None
            assert (job.id, job.attempt) == ("b", 1), "as if there were no record"
            assert await ends.theirs.nak(job) is Settlement.APPLIED
        await ends.store(lease("b"), encode_record(forged))
        job = await ends.theirs.take(wait_s=60)
        assert job is not None
        await ends.store(lease("b"), encode_record(forged))
        assert await ends.theirs.ack(job) is Settlement.STALE
        assert await ends.ours.dead_letters() == []
        assert ends.refused
