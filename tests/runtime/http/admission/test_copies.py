"""One body of many choices: how many copies of its prompt there are at once, on their way to workers."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.runtime.small_cluster import open_small_cluster
from trinamo.runtime.caller.client import Client, ResponseStream
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.http.bodies import SMALL_BODY_BYTES, Bodies
from trinamo.runtime.http.choices import answer_choices
from trinamo.runtime.protocol.openai.generate import GenerateRequest


@attrs.define(eq=False)
class Workers:
    """In place of them: each choice waits for `begin` and its end."""

    asked: list[Worker] = attrs.field(factory=list)

    def forward(self, begun: Callable[[], None]) -> Any:
        async def forward(*_: Any) -> None:
            worker = Worker(begun)
            self.asked.append(worker)
            await worker.is_over.wait()

        return forward


@attrs.define(eq=False)
class Worker:
    begin: Callable[[], None]
    is_over: trio.Event = attrs.field(factory=trio.Event)


@attrs.define(eq=False)
class Places:
    """How many more than its own the answer holds."""

    held: int = 0

    def take(self) -> bool:
        self.held += 1
        return True

    def give(self) -> None:
        self.held -= 1


@asynccontextmanager
async def answering(
    workers: Workers, bodies: Bodies, count: int, size: int, places: Places | None = None
) -> AsyncIterator[Context]:
    """So many choices of a prompt, of which a copy has `size` bytes beyond those that do not count."""
    places = places or Places()
    choice = SimpleNamespace(silence_count=0, has_begun=False, finish=lambda: None)
    with Context("r") as context:
        delivery: Any = SimpleNamespace(context=context)
        sink: Any = SimpleNamespace(choices=[choice] * count, has_begun=False)
        queue = SimpleNamespace(length=0, timeout_s=math.inf)
        admission: Any = SimpleNamespace(
            bodies=bodies, queue=queue, take_place=places.take, give_place=places.give
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                answer_choices,
                [GenerateRequest(model="m", prompt="a")] * count,
                delivery,
                sink,
                workers.forward,
                admission,
                SMALL_BODY_BYTES + size,
            )
            await wait_all_tasks_blocked()
            yield context


@pytest.mark.parametrize("size", [10, 0])
async def test_the_first_choice_of_a_long_prompt_goes_alone_until_its_answer_begins(
    size: int,
) -> None:
    workers = Workers()
    async with answering(workers, Bodies(2000), 5, size):
        if size:
            assert len(workers.asked) == 1
            workers.asked[0].begin()
            await wait_all_tasks_blocked()
        assert len(workers.asked) == 5
        for each in workers.asked:
            each.is_over.set()


async def test_a_first_choice_that_ends_at_once_holds_up_no_other() -> None:
    workers = Workers()
    async with answering(workers, Bodies(2000), 3, 10):
        for number in range(3):
            workers.asked[number].is_over.set()
            await wait_all_tasks_blocked()
    assert len(workers.asked) == 3


@pytest.mark.parametrize("begins", [False, True])
async def test_an_answer_that_is_stopped_keeps_no_place(*, begins: bool) -> None:
    """Also if it is stopped while its first choice is alone, of which the others were to follow."""
    workers, places = Workers(), Places()
    async with answering(workers, Bodies(2000), 5, 10, places) as context:
        if begins:
            workers.asked[0].begin()
            await wait_all_tasks_blocked()
            assert places.held == 4
        context.stop(Reason.CLIENT_DISCONNECT)
        for each in workers.asked:
            each.is_over.set()
    assert places.held == 0
    assert len(workers.asked) == (5 if begins else 1)


async def test_copies_count_as_bodies_until_their_answers_begin() -> None:
    """Without room one follows the other, in the place that the answer has anyway."""
    workers, bodies = Workers(), Bodies(50)
    async with answering(workers, bodies, 6, 10):
        assert (len(workers.asked), bodies.bytes_held) == (1, 10)
        workers.asked[0].begin()
        assert bodies.bytes_held == 0
        await wait_all_tasks_blocked()
        assert (len(workers.asked), bodies.bytes_held) == (3, 20)
        for each in workers.asked[1:]:
            each.begin()
        workers.asked[1].is_over.set()
        await wait_all_tasks_blocked()
        # Its own next one, and as many again as there is room for.
        assert (len(workers.asked), bodies.bytes_held) == (5, 20)
        while not all(each.is_over.is_set() for each in workers.asked):
            for each in workers.asked:
                each.begin()
                each.is_over.set()
            await wait_all_tasks_blocked()
    assert len(workers.asked) == 6
    assert bodies.bytes_held == 0


async def test_a_choice_without_room_beside_others_goes_on_alone() -> None:
    workers, bodies = Workers(), Bodies(10)
    async with answering(workers, bodies, 2, 10):
        workers.asked[0].begin()
        await wait_all_tasks_blocked()
        assert len(workers.asked) == 1
        workers.asked[0].is_over.set()
        await wait_all_tasks_blocked()
        assert (len(workers.asked), bodies.bytes_held) == (2, 0)
        workers.asked[1].is_over.set()


@pytest.mark.parametrize("prompt", ["a" * 100_000, "one two"])
async def test_a_prompt_that_no_worker_takes_is_encoded_once(
    monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    """And what was sent is kept no longer than until the answer begins."""
    streams: list[ResponseStream[Any]] = []
    make = Client.stream

    def stream(*args: Any, **options: Any) -> ResponseStream[Any]:
        streams.append(make(*args, **options))
        return streams[-1]

    monkeypatch.setattr(Client, "stream", stream)
    async with open_small_cluster() as cluster:
        answer = await cluster.ask(prompt=prompt, n=8)
    if len(prompt) > 100:
        assert answer.status_code == 400
        assert len(streams) == 1
    else:
        assert answer.status_code == 200
        assert len(streams) == 8
        assert not any(each._asked.payload for each in streams)
