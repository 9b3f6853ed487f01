"""What a simulated broker's faults look like to its clients, and its leased queues."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable

import pytest
import trio

from trinamo.runtime.errors import (
    DeadlineError,
    OverloadedError,
    UnavailableError,
    UnknownOutcomeError,
)
from trinamo.runtime.planes import LeasedJob, PutResult, QueueLimits, Settlement, WorkQueue
from trinamo.sim import Message, Network, SeedChoices, SimEnv, Verdict, World
from trinamo.sim.net.bus import DROP
from trinamo.sim.services import SimulatedNats
from trinamo.sim.services.nats.wire import Publish
from trinamo.transports.nats import NatsEventPlane, open_nats

LIMITS = QueueLimits(visibility_timeout_s=5.0, attempts_max=3, depth_max=4)


class Stage:
    """A broker and its network; `open` gives a plane on the running host."""

    def __init__(self, seed: int = 1, *, pending_bytes_max: int = 64 << 20) -> None:
        self.world = World(SeedChoices(seed), ambient="raise")
        self.network = Network(self.world)
        self.nats = SimulatedNats(self.world, pending_bytes_max=pending_bytes_max)
        self._numbers = itertools.count(1)

    def open(self, name: str = "client"):  # type: ignore[no-untyped-def]
        return open_nats(self.nats.url, env=SimEnv(self.world, name))

    def play(self, story: Callable[[Stage, NatsEventPlane], Awaitable[None]]) -> str:
        async def client() -> None:
            async with self.open() as plane:
                await story(self, plane)

        async def main() -> None:
            self.nats.boot()
            await self.world.boot("client", client).ended.wait()

        return self.world.run(main)


def queue_story(body: Callable[[Stage, WorkQueue], Awaitable[None]]) -> str:
    async def story(stage: Stage, plane: NatsEventPlane) -> None:
        async with plane.work_queue("jobs", limits=LIMITS) as queue:
            await body(stage, queue)

    return Stage().play(story)


async def taken(queue: WorkQueue, wait_s: float = 1.0) -> LeasedJob:
    job = await queue.take(wait_s=wait_s)
    assert job is not None
    return job


def test_a_message_on_its_way_when_the_broker_dies_is_lost_and_the_next_one_is_not() -> None:
    async def story(stage: Stage, plane: NatsEventPlane) -> None:
        async with plane.subscribe("a") as subscription:
            await plane.publish("a", b"lost")
            stage.nats.kill()
            await trio.sleep(0.2)
            await plane.publish("a", b"kept")
            stage.nats.restart()
            with trio.fail_after(120):
                assert (await anext(subscription)).payload == b"kept"

    Stage().play(story)


def test_a_client_that_is_paused_for_too_many_messages_is_cut_off_and_comes_back() -> None:
    stage = Stage(pending_bytes_max=80_000)
    stage.network.window_bytes = 1024
    got: list[bytes] = []

    async def listen() -> None:
        async with stage.open("slow") as plane, plane.subscribe("a") as subscription:
            async for message in subscription:
                got.append(message.payload)  # noqa: PERF401 -- the test looks while it grows

    async def story(stage: Stage, plane: NatsEventPlane) -> None:
        stage.world.boot("slow", listen)
        await trio.sleep(0.5)
        stage.world.pause("slow")
        for number in range(300):
            await plane.publish("a", b"%03d" % number + bytes(10_000))
            await trio.sleep(0.01)
        stage.world.resume("slow")
        await trio.sleep(30)
        # What was on the wire when the broker gave it up; nothing comes twice.
        assert len(got) < 300
        assert got == sorted(got)
        await plane.publish("a", b"999")
        await trio.sleep(1)
        assert got[-1] == b"999"
        assert any(row.kind == "nats.slow" for row in stage.world.trace.rows)

    stage.play(story)


def test_a_dropped_message_is_dropped_for_good() -> None:
    def drops_two(message: Message) -> Verdict | None:
        said = message.payload
        return DROP if isinstance(said, Publish) and said.payload == b"2" else None

    async def story(stage: Stage, plane: NatsEventPlane) -> None:
        async with plane.subscribe("a") as subscription:
            stage.nats.interceptor.rules.append(drops_two)
            for payload in (b"1", b"2", b"3"):
                await plane.publish("a", payload)
            assert [(await anext(subscription)).payload for _ in range(2)] == [b"1", b"3"]

    Stage().play(story)


def test_a_job_is_leased_expires_is_taken_again_and_its_first_lease_is_stale() -> None:
    async def body(stage: Stage, queue: WorkQueue) -> None:
        assert await queue.put("1", b"x") is PutResult.ADDED
        assert await queue.put("1", b"x") is PutResult.DUPLICATE
        first = await taken(queue)
        assert (first.id, first.payload, first.attempt) == ("1", b"x", 1)
        assert await queue.take(wait_s=1.0) is None
        second = await taken(queue, wait_s=10)
        assert second.attempt == 2
        assert await queue.ack(first) is Settlement.STALE
        assert await queue.extend(second) is Settlement.APPLIED
        assert await queue.ack(second) is Settlement.APPLIED
        assert (await queue.statistics()).depth == 0

    queue_story(body)


def test_a_job_that_fails_too_often_is_a_dead_letter_that_can_be_brought_back() -> None:
    async def body(stage: Stage, queue: WorkQueue) -> None:
        await queue.put("1", b"x")
        settled = [await queue.nak(await taken(queue), reason="no") for _ in range(3)]
        assert settled == [Settlement.APPLIED, Settlement.APPLIED, Settlement.DEAD]
        (letter,) = await queue.dead_letters()
        assert (letter.id, letter.attempts, letter.reason) == ("1", 3, "no")
        assert await queue.requeue("1") is True
        assert await queue.ack(await taken(queue)) is Settlement.APPLIED
        assert await queue.dead_letter("1") is None

    queue_story(body)


def test_a_full_queue_refuses_with_its_bound() -> None:
    async def body(stage: Stage, queue: WorkQueue) -> None:
        for number in range(4):
            await queue.put(str(number), b"")
        with pytest.raises(OverloadedError) as caught:
            await queue.put("5", b"")
        assert (caught.value.bound, caught.value.value) == ("depth_max", 4)

    queue_story(body)


@pytest.mark.parametrize("op", ["store", "ack"])
def test_a_request_whose_answer_is_lost_is_repeated_with_one_effect(op: str) -> None:
    async def body(stage: Stage, queue: WorkQueue) -> None:
        stage.nats.lose_replies(op=op)
        assert await queue.put("1", b"x") is PutResult.ADDED
        stage.nats.lose_replies(op=op)
        job = await taken(queue)
        stage.nats.lose_replies(op=op)
        assert await queue.extend(job) is Settlement.APPLIED
        stage.nats.lose_replies(op=op)
        assert await queue.nak(job) is Settlement.APPLIED
        job = await taken(queue)
        assert job.attempt == 2
        stage.nats.lose_replies(op=op)
        assert await queue.ack(job) is Settlement.APPLIED
        assert (await queue.statistics()).depth == 0
        assert await queue.take(wait_s=10.0) is None

    queue_story(body)


def test_a_leader_change_is_bridged_and_a_long_one_is_a_definite_deadline() -> None:
    async def body(stage: Stage, queue: WorkQueue) -> None:
        stage.nats.refuse(8.0)
        assert await queue.put("1", b"x") is PutResult.ADDED
        assert trio.current_time() > 8.0
        stage.nats.refuse(60.0)
        with pytest.raises(DeadlineError) as caught:
            await queue.put("2", b"x", timeout_s=3)
        assert caught.value.definite

    queue_story(body)


def test_a_broker_that_never_answers_leaves_the_outcome_unknown() -> None:
    async def body(stage: Stage, queue: WorkQueue) -> None:
        stage.nats.pause()
        with pytest.raises(UnknownOutcomeError):
            await queue.put("1", b"x", timeout_s=3)
        stage.nats.resume()
        assert await queue.put("1", b"x") is PutResult.DUPLICATE

    queue_story(body)


def test_queues_outlive_the_process_but_not_the_disk() -> None:
    async def story(stage: Stage, plane: NatsEventPlane) -> None:
        async with plane.work_queue("jobs", limits=LIMITS) as queue:
            await queue.put("1", b"x")
            stage.nats.kill()
            stage.nats.restart()
            assert (await taken(queue, wait_s=10)).id == "1"
            assert await plane.work_queue_names() == ["jobs"]
            stage.nats.kill()
            stage.nats.restart(keeps_disk=False)
            assert await plane.work_queue_names() == []
            with pytest.raises(UnavailableError):
                async with plane.work_queue("jobs"):
                    pass

    Stage().play(story)


def test_a_taker_that_gives_up_takes_nothing_with_it() -> None:
    async def body(stage: Stage, queue: WorkQueue) -> None:
        with trio.move_on_after(0.5):
            await queue.take(wait_s=60)
        await queue.put("1", b"x")
        assert (await taken(queue)).attempt == 1

    queue_story(body)


@pytest.mark.parametrize("seed", range(4))
def test_jobs_are_done_once_by_takers_that_die_and_a_broker_that_restarts(seed: int) -> None:
    """I8: effects made under an applied ack happen once per job; nothing is lost."""
    stage = Stage(seed)
    done: list[str] = []
    limits = QueueLimits(visibility_timeout_s=3.0, attempts_max=100)

    async def work(name: str) -> None:
        async with stage.open(name) as plane, plane.work_queue("jobs") as queue:
            while True:
                job = await queue.take(wait_s=5)
                if job is None:
                    continue
                await trio.sleep(0.7)
                try:
                    if await queue.ack(job, timeout_s=2) is Settlement.APPLIED:
                        done.append(job.id)
                except (DeadlineError, UnknownOutcomeError):
                    stage.world.note("unsettled", job=job.id)

    async def story(stage: Stage, plane: NatsEventPlane) -> None:
        world = stage.world
        async with plane.work_queue("jobs", limits=limits) as queue:
            for number in range(20):
                await queue.put(str(number), b"")
            for number in range(3):
                world.boot(f"worker-{number}", work, f"worker-{number}")
            await trio.sleep(1.5)
            world.kill("worker-0")
            stage.nats.lose_replies(op="store")
            await trio.sleep(1)
            stage.nats.kill()
            await trio.sleep(1)
            stage.nats.restart()
            world.boot("worker-0", work, "worker-0")
            await trio.sleep(40)
            assert (await queue.statistics()).depth == 0
            assert len(done) == len(set(done)) <= 20

    stage.play(story)


def test_the_same_seed_gives_the_same_run() -> None:
    async def body(stage: Stage, queue: WorkQueue) -> None:
        stage.nats.refuse(2)
        await queue.put("1", b"x")
        stage.nats.kill()
        stage.nats.restart()
        await queue.ack(await taken(queue, wait_s=10))

    assert queue_story(body) == queue_story(body)
