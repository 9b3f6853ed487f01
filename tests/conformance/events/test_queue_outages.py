"""Work queues whose broker is killed, and comes back."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from tests.transports.nats.brokers import Broker, wait_away
from trinamo.conformance.queues import LIMITS, fresh_name, taken
from trinamo.runtime.errors import DeadlineError, TrinamoError
from trinamo.runtime.planes import QueueLimits, Settlement


@pytest.fixture
def name() -> str:
    return fresh_name()


async def test_jobs_leases_and_fences_outlive_a_killed_broker(
    mortal_broker: Broker, name: str
) -> None:
    limits = QueueLimits(visibility_timeout_s=60, attempts_max=3)
    with trio.fail_after(120):
        async with mortal_broker.connect() as plane, plane.work_queue(name, limits=limits) as queue:
            for number in range(20):
                await queue.put(f"job-{number}", b"")
            done = [await taken(queue) for _ in range(5)]
            for job in done:
                assert await queue.ack(job) is Settlement.APPLIED
            held = await taken(queue)
            await mortal_broker.stop()
            await wait_away(plane)
            assert await queue.take(wait_s=0) is None
            with pytest.raises(TrinamoError):
                await queue.put("nobody-there", b"", timeout_s=0.3)
            await mortal_broker.start()
            assert await queue.ack(held) is Settlement.APPLIED
            for job in done:
                # The broker may have forgotten the id; the queue has not.
                await queue.put(job.id, b"again")
            left = [f"job-{number}" for number in range(6, 20)]
            while left:
                job = await taken(queue)
                assert job.payload == b""
                assert await queue.ack(job) is Settlement.APPLIED
                if job.id != "nobody-there":
                    left.remove(job.id)
            assert await queue.take(wait_s=0) is None
            while (await queue.statistics()).depth:
                await trio.sleep(0.01)


async def test_a_put_bridges_a_broker_that_comes_back(mortal_broker: Broker, name: str) -> None:
    with trio.fail_after(120):
        async with mortal_broker.connect() as plane, plane.work_queue(name, limits=LIMITS) as queue:
            await mortal_broker.stop()
            await wait_away(plane)
            with pytest.raises(DeadlineError) as caught:
                await queue.put("early", b"", timeout_s=0.2)
            assert caught.value.definite
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(queue.put, "late", b"", timeout_s=60))
                await trio.sleep(0.3)
                await mortal_broker.start()
            assert (await taken(queue)).id == "late"
