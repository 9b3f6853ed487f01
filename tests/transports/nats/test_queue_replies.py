"""A broker, or whoever answers in its place, can say anything: it ends no more than one job."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import RemoteProtocolError, TrinamoError
from trinamo.runtime.planes import Message, QueueLimits
from trinamo.runtime.protocol.queue.jobs import LeasedJob
from trinamo.transports.nats.queue.records import read_dead_headers
from trinamo.transports.nats.queue.streams import list_work_queues
from trinamo.transports.nats.queue.work_queue import NatsWorkQueue, open_work_queue
from trinamo.transports.security.sealing import Sealer

TIME = "2026-01-01T00:00:00.5Z"
ACK = "$JS.ACK.s.c.2.7.9.1700000000000000000.0"
LONG = "9" * 5000
RECORD = "eyJzdGF0ZSI6IndhaXRpbmciLCJqb2IiOjcsImF0dGVtcHQiOjEsInRva2VuIjoidCIsInB1dF9ucyI6MX0="
INFO = {"config": {"description": "{}"}, "state": {"messages": 1, "first_ts": TIME}}
FOUND = {"message": {"subject": "a.b", "seq": 3, "data": RECORD, "hdrs": "", "time": TIME}}
REPLIES: dict[str, dict[str, Any]] = {
    "STREAM.NAMES": {"total": 1, "streams": ["trinamo-queue-q-jobs"]},
    "STREAM.INFO": INFO,
    "CONSUMER.INFO": {"num_ack_pending": 0},
    "STREAM.PURGE": {"purged": 1},
    "STREAM.MSG.GET": FOUND,
    ".job.": {"stream": "s", "seq": 1, "duplicate": False},
    ".lease.": {"stream": "s", "seq": 4},
    ".dead.": {"stream": "s", "seq": 5},
}
INBOX = "i.x"
WRONG: Mapping[str, Callable[[Any], Any]] = {
    "missing": lambda _: None,
    "object": lambda _: {"a": 1},
    "list": lambda _: [1],
    "text": lambda _: "text",
    "number": lambda _: -1,
    "long": lambda _: "@LONG",
    "null": lambda _: None,
}


def fields() -> list[tuple[str, tuple[str, ...]]]:
    """Each field of each reply, and an error that stands in its place."""

    found: list[tuple[str, tuple[str, ...]]] = []
    for name, reply in REPLIES.items():
        for key, value in {**reply, "error": {"description": "d", "err_code": 1}}.items():
            paths: list[tuple[str, ...]] = [(key,)]
            if isinstance(value, dict):
                paths += [(key, inner) for inner in value]
            found += [(name, path) for path in paths]
    return found


def spoilt(reply: dict[str, Any], path: tuple[str, ...], wrong: str) -> bytes:
    """`reply` with one field as it should not be."""
    whole = json.loads(json.dumps(reply))
    place = whole
    for key in path[:-1]:
        place = place.setdefault(key, {})
    if wrong == "missing":
        place.pop(path[-1], None)
    else:
        place[path[-1]] = WRONG[wrong](place.get(path[-1]))
    return json.dumps(whole).replace('"@LONG"', LONG).encode()


@attrs.define(eq=False)
class Liar:
    """An event plane behind which a JetStream has one job, and answers what it is told to."""

    message_bytes_max = 1 << 20
    is_connected = True
    lies: dict[str, bytes] = attrs.field(factory=dict)
    never: str = ""
    returned: list[str] = attrs.field(factory=list)
    _out: trio.MemorySendChannel[Message] | None = None
    _inbox: str = ""

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Message:
        await trio.lowlevel.checkpoint()
        if self.never and self.never in subject:
            try:
                await trio.sleep_forever()
            finally:
                # What cleans up takes its time.
                with trio.CancelScope(shield=True):
                    await trio.sleep(1)
        for part, reply in REPLIES.items():
            if part in subject:
                told = self.lies.get(part, json.dumps(reply).encode())
                return Message(subject, told, "", {})
        return Message(subject, b"" if "ACK" in subject else b"{}", "", {})

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        await trio.sleep(0.1)
        if "MSG.NEXT" in subject and self._out is not None:
            job = Message("trinamo.queue.q.job.one", b"p", ACK, {})
            with suppress(trio.WouldBlock):
                self._out.send_nowait(job)
        elif subject.startswith(INBOX) and self._out is not None:
            with suppress(trio.WouldBlock):
                self._out.send_nowait(Message(subject, payload, "", {}))
        else:
            self.returned.append(subject)

    @asynccontextmanager
    async def subscribe(
        self, subject: str, *, group: str = "", pending_max: int = 1
    ) -> AsyncIterator[AsyncIterator[Message]]:
        self._out, received = trio.open_memory_channel[Message](1)
        async with received:
            yield received


@asynccontextmanager
async def opened(liar: Liar) -> AsyncIterator[NatsWorkQueue]:
    async with open_work_queue(
        liar,
        "q",
        limits=QueueLimits(),
        replicas=1,
        inbox=INBOX,
        env=RealEnv(),
        sealer=Sealer([], random.Random(1)),
    ) as queue:
        yield queue


async def use(queue: NatsWorkQueue, liar: Liar) -> None:
    """Everything that is done with a queue; only what callers know to handle comes out."""

    async def work() -> None:
        job = await queue.take(wait_s=1)
        if job is not None:
            assert isinstance(job, LeasedJob)
            await queue.extend(job, timeout_s=1)
            await queue.nak(job, delay_s=1, timeout_s=1)

    steps: list[Callable[[], Any]] = [
        lambda: queue.put("one", b"p", timeout_s=1),
        work,
        queue.statistics,
        lambda: queue.dead_letters(count_max=1),
        lambda: queue.requeue("one"),
        queue.purge_dead,
        lambda: list_work_queues(liar, rng=random.Random(1)),
    ]
    for step in steps:
        with suppress(TrinamoError), trio.move_on_after(100):
            await step()


async def test_the_liar_that_does_not_lie_serves_a_queue(autojump_clock: MockClock) -> None:
    liar = Liar()
    async with opened(liar) as queue:
        job = await queue.take(wait_s=1)
        assert job is not None
        assert (job.id, job.attempt) == ("one", 2)
        assert (await queue.statistics()).ready == 1
        assert [each.id for each in await queue.dead_letters(count_max=1)] == ["b"]
        assert await list_work_queues(liar, rng=random.Random(1)) == ["q"]


class FarAway(Liar):
    """Each answer takes its time."""

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Message:
        await trio.sleep(0.9)
        return await super().request(subject, payload, timeout_s=timeout_s, headers=headers)


async def test_dead_letters_are_listed_however_long_all_of_them_take(
    autojump_clock: MockClock,
) -> None:
    async with opened(FarAway()) as queue:
        assert len(await queue.dead_letters(count_max=50)) == 50


@pytest.mark.check
@pytest.mark.parametrize("wrong", WRONG)
async def test_no_field_of_no_reply_ends_more_than_one_job(
    wrong: str, autojump_clock: MockClock
) -> None:
    """Each field of each reply in turn: missing, of another type, or a number of 5,000 digits."""
    for name, path in fields():
        liar = Liar(lies={name: spoilt(REPLIES[name], path, wrong)})
        async with opened(liar) as queue:
            await use(queue, liar)
            liar.lies.clear()
            job = await queue.take(wait_s=1)
            assert job is not None, f"no job after {name} {path} was {wrong}"


@pytest.mark.parametrize(
    "junk", [b"", b"[]", b"\xff", b'{"seq": ' + LONG.encode() + b"}", b"[" * 9999]
)
async def test_what_is_no_answer_is_asked_again_and_then_told_as_that(
    junk: bytes, autojump_clock: MockClock
) -> None:
    liar = Liar(lies={".job.": junk})
    async with opened(liar) as queue:
        with pytest.raises(RemoteProtocolError):
            await queue.put("one", b"p", timeout_s=2)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(queue.put, "one", b"p")
            await trio.sleep(1)
            # Who answered in the server's place has gone.
            liar.lies.clear()


def test_a_dead_letter_with_any_count_of_attempts_is_shown() -> None:
    for text in (LONG, "-1", "x", "²", ""):
        assert read_dead_headers({"Trinamo-Attempts": text}) == (0, "")


async def test_a_handle_that_is_cancelled_while_it_claims_a_job_is_left(
    autojump_clock: MockClock,
) -> None:
    """Its delivery finds nobody who could give it back: it expires, and comes again."""
    liar = Liar(never=".lease.")
    with trio.move_on_after(3) as scope:
        async with trio.open_nursery() as nursery:
            queue = await nursery.start(_hold, liar)
            await queue.take(wait_s=60)
    assert scope.cancelled_caught


async def _hold(liar: Liar, *, task_status: trio.TaskStatus[NatsWorkQueue]) -> None:
    async with opened(liar) as queue:
        task_status.started(queue)
        await trio.sleep_forever()
