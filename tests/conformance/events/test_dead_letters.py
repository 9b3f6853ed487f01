"""How jobs die, and come back: whatever their reason says, whoever was cut off, whichever limits were in force."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import attrs
import pytest
import trio

from tests.transports.nats.brokers import Broker
from trinamo.conformance.queues import LIMITS, SHORT, bury, dead_letter_of, fresh_name, taken
from trinamo.runtime.errors import DeadlineError
from trinamo.runtime.planes import EventPlane, Message, PutResult, QueueLimits, Settlement

from .conftest import NATS

ONE_ATTEMPT = attrs.evolve(LIMITS, attempts_max=1)
HEADERS_BYTES = 4096
"""What a queue on NATS keeps free in a message."""
ON_NATS = pytest.mark.parametrize("broker", ["simulated", NATS], indirect=True)


@pytest.fixture
async def plane(broker: Broker) -> AsyncIterator[EventPlane]:
    with trio.fail_after(120):
        async with broker.connect() as plane:
            yield plane


@pytest.fixture
def name() -> str:
    return fresh_name()


@pytest.mark.parametrize("reason", ["錯" * 512, "\N{PILE OF POO}" * 512, "é" * 512, "%\n" * 256])
async def test_the_largest_job_is_a_dead_letter_whatever_the_reason_says(
    plane: EventPlane, name: str, reason: str
) -> None:
    payload = b"x" * (plane.message_bytes_max - HEADERS_BYTES)
    async with plane.work_queue(name, limits=ONE_ATTEMPT) as queue:
        await queue.put("large", payload)
        assert await queue.nak(await taken(queue), reason=reason) is Settlement.DEAD
        letter = await queue.dead_letter("large")
        assert letter is not None
        assert letter.payload == payload
        assert letter.reason
        assert reason.startswith(letter.reason)
        assert await queue.requeue("large")
        assert (await taken(queue)).payload == payload


@pytest.mark.parametrize("secrets", [(), (bytes(range(32)),)])
async def test_a_reason_that_no_encoder_takes_is_told_without_what_it_does_not_take(
    broker: Broker, name: str, secrets: tuple[bytes, ...]
) -> None:
    """A payload of JSON may hold a lone surrogate, and an error's text what it is about."""
    async with (
        broker.connect(*secrets) as plane,
        plane.work_queue(name, limits=ONE_ATTEMPT) as queue,
    ):
        await queue.put("job", b"")
        assert await queue.nak(await taken(queue), reason="no page \ud800") is Settlement.DEAD
        (letter,) = await queue.dead_letters()
        assert letter.reason.startswith("no page ")


async def test_an_id_is_remembered_from_its_put_and_not_from_when_it_was_queued_again(
    plane: EventPlane, name: str
) -> None:
    """What is answered as added is done."""
    limits = attrs.evolve(LIMITS, duplicate_window_s=0.5)
    async with plane.work_queue(name, limits=limits) as queue:
        await bury(queue, "job")
        await trio.sleep(0.7)
        assert await queue.requeue("job")
        assert await queue.put("job", b"meanwhile") is PutResult.DUPLICATE
        again = await taken(queue)
        assert await queue.nak(again) is Settlement.APPLIED
        assert await queue.ack(await taken(queue)) is Settlement.APPLIED
        assert await queue.put("job", b"anew") is PutResult.ADDED
        assert (await taken(queue)).payload == b"anew"


class CutOff:
    """While it is on, whoever asks something with `part` in its subject is cut off: it is asked, or not, and answered by nobody."""

    def __init__(
        self, plane: EventPlane, monkeypatch: pytest.MonkeyPatch, part: str, *, is_asked: bool
    ) -> None:
        self.is_on = True
        self.scope: trio.CancelScope | None = None
        """Who is cancelled then."""
        self._part, self._is_asked, self._request = part, is_asked, cast("Any", plane.request)
        monkeypatch.setattr(plane, "request", self)

    async def __call__(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Mapping[str, str] = {}
    ) -> Message:
        is_cut = self.is_on and self._part in subject
        answer: Message | None = None
        if not is_cut or self._is_asked:
            answer = await self._request(subject, payload, timeout_s=timeout_s, headers=headers)
        if answer is not None and not is_cut:
            return answer
        if self.scope is not None:
            self.is_on = False
            self.scope.cancel()
        await trio.sleep(timeout_s)
        raise DeadlineError("cut off", definite=not self._is_asked)


class Late:
    """The first request with `part` in its subject leaves so much later."""

    def __init__(
        self, plane: EventPlane, monkeypatch: pytest.MonkeyPatch, part: str, *, by_s: float
    ) -> None:
        self.is_over = False
        self._part, self._by_s, self._request = part, by_s, cast("Any", plane.request)
        self._is_begun = False
        monkeypatch.setattr(plane, "request", self)

    async def __call__(self, subject: str, payload: bytes, **options: Any) -> Message:
        if self._part in subject and not self._is_begun:
            self._is_begun = True
            await trio.sleep(self._by_s)
            self.is_over = True
        answer: Message = await self._request(subject, payload, **options)
        return answer


@ON_NATS
async def test_a_dead_letter_whose_job_was_not_acknowledged_is_queued_again_with_all_attempts(
    plane: EventPlane, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with plane.work_queue(name, limits=LIMITS) as queue:
        await queue.put("job", b"payload")
        for _ in range(LIMITS.attempts_max - 1):
            await queue.nak(await taken(queue), reason="no luck")
        last = await taken(queue)
        acknowledgements = CutOff(plane, monkeypatch, "$JS.ACK", is_asked=False)
        assert await queue.nak(last, reason="no luck") is Settlement.DEAD
        acknowledgements.is_on = False
        assert (await queue.statistics()).depth == 1
        assert await queue.requeue("job")
        again = await taken(queue)
        assert (again.payload, again.attempt) == (b"payload", 1)
        assert await queue.ack(again) is Settlement.APPLIED
        statistics = await queue.statistics()
        assert (statistics.depth, statistics.dead) == (0, 0)


async def test_a_job_put_since_stands_for_a_dead_letter_of_its_id_too(
    plane: EventPlane, name: str
) -> None:
    limits = attrs.evolve(LIMITS, duplicate_window_s=0.2)
    async with plane.work_queue(name, limits=limits) as queue:
        await bury(queue, "job")
        await trio.sleep(0.4)
        assert await queue.put("job", b"since") is PutResult.ADDED
        assert await queue.requeue("job")
        assert await queue.dead_letters() == []
        job = await taken(queue)
        assert job.payload == b"since"
        assert await queue.ack(job) is Settlement.APPLIED
        assert await queue.take(wait_s=0) is None


async def test_a_dead_letter_that_two_queue_again_at_once_is_one_job(
    plane: EventPlane, name: str
) -> None:
    async with plane.work_queue(name, limits=LIMITS) as queue:
        for number in range(10):
            await bury(queue, f"job-{number}")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(queue.requeue, f"job-{number}")
                nursery.start_soon(queue.requeue, f"job-{number}")
            assert await queue.ack(await taken(queue)) is Settlement.APPLIED
            statistics = await queue.statistics()
            assert (statistics.depth, statistics.dead) == (0, 0)


@ON_NATS
async def test_a_lease_whose_taker_was_cancelled_costs_no_attempt(
    plane: EventPlane, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cancelled while the lease was written: nobody has worked on the job."""
    limits = attrs.evolve(ONE_ATTEMPT, visibility_timeout_s=60)
    async with plane.work_queue(name, limits=limits) as queue:
        await queue.put("job", b"")
        leases = CutOff(plane, monkeypatch, ".lease.", is_asked=True)
        with trio.CancelScope() as leases.scope:
            await queue.take(wait_s=0)
        assert leases.scope.cancelled_caught
        job = await taken(queue)
        assert job.attempt == 1
        assert await queue.ack(job) is Settlement.APPLIED
        assert (await queue.statistics()).dead == 0


@pytest.mark.parametrize("broker", ["simulated"], indirect=True)
async def test_a_lease_whose_answer_was_lost_costs_no_attempt(
    plane: EventPlane, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It expires, and the job comes again while its record still counts the lease that no taker was told of."""
    limits = attrs.evolve(ONE_ATTEMPT, visibility_timeout_s=2)
    async with plane.work_queue(name, limits=limits) as queue:
        await queue.put("job", b"")
        leases = CutOff(plane, monkeypatch, ".lease.", is_asked=True)
        assert await queue.take(wait_s=0) is None
        leases.is_on = False
        taking_back = Late(plane, monkeypatch, ".lease.", by_s=0.5)
        job = await taken(queue)
        assert taking_back.is_over
        assert job.attempt == 1
        assert await queue.ack(job) is Settlement.APPLIED
        assert (await queue.statistics()).dead == 0


@ON_NATS
async def test_a_job_whose_takers_all_vanished_is_logged_by_whoever_finds_it_dead(
    plane: EventPlane, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with plane.work_queue(name, limits=attrs.evolve(SHORT, attempts_max=1)) as queue:
        await queue.put("crash", b"")
        await taken(queue)
        await dead_letter_of(queue, "crash")
    (record,) = (each for each in caplog.records if each.levelname == "ERROR")
    told = f"queue {name}: job crash is a dead letter after 1 attempts: its last lease expired"
    assert record.getMessage() == told


@pytest.mark.parametrize("gives_limits", [True, False])
async def test_limits_that_another_process_names_are_in_force_for_whoever_has_it_open(
    plane: EventPlane, broker: Broker, name: str, gives_limits: bool
) -> None:
    """Attempts are counted, and copies known, by what holds now; nor does a lease that is shorter keep jobs away."""
    old = QueueLimits(visibility_timeout_s=20, attempts_max=2, duplicate_window_s=60)
    new = QueueLimits(visibility_timeout_s=10, attempts_max=4, duplicate_window_s=0.3)
    async with (
        broker.connect() as elsewhere,
        elsewhere.work_queue(name, limits=old) as first,
        plane.work_queue(name, limits=old if gives_limits else None) as queue,
        elsewhere.work_queue(name, limits=new),
    ):
        await first.put("job", b"")
        for attempt in range(1, 4):
            job = await taken(queue)
            assert job.attempt == attempt
            assert await queue.nak(job) is Settlement.APPLIED
        assert await queue.ack(await taken(queue)) is Settlement.APPLIED
        await trio.sleep(0.5)
        assert await first.put("job", b"anew") is PutResult.ADDED
        assert await queue.ack(await taken(queue)) is Settlement.APPLIED
        assert queue.limits == new
