"""Clients of several frontends with TLS and keys, behind a balancer that looks at their health."""

from __future__ import annotations

import itertools
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Final

import attrs
import httpx
import trio

from tests.soak.asking import Answer, Outcome, ask_in_time, judged
from tests.soak.balancing import LOOK_S, Balancer
from tests.soak.plan import Question

CLIENTS: Final = 4
QUESTIONS: Final = [
    Question(
        number,
        "chat/completions" if number % 2 else "completions",
        {
            "model": "exact",
            "max_tokens": 60,
            "temperature": 0,
            **(
                {"messages": [{"role": "user", "content": f"{number} says hello"}]}
                if number % 2
                else {"prompt": f"{number} says hello"}
            ),
        },
    )
    for number in range(6)
]


@attrs.define(eq=False)
class Clients:
    """Ask all the time, and judge every answer."""

    urls: list[str]
    client: httpx.AsyncClient
    wholes: dict[int, Answer] = attrs.field(factory=dict)
    balancer: Balancer = attrs.field(init=False)
    counts: dict[str, int] = attrs.field(factory=dict)
    bad: list[str] = attrs.field(factory=list)
    """What was not the whole answer, and what was said instead."""

    def __attrs_post_init__(self) -> None:
        self.balancer = Balancer(lambda: {url: url for url in self.urls})

    @property
    def right(self) -> int:
        return self.counts.get(Outcome.RIGHT, 0)

    async def learn(self) -> None:
        """The answers, while nothing is done to anybody; each from another frontend in turn."""
        for question in QUESTIONS:
            url = self.urls[question.number % len(self.urls)]
            answer, _ = await ask_in_time(
                self.client, url, question, request_id=f"learn-{question.number}", is_streamed=False
            )
            assert answer.status == 200, answer
            assert answer.is_ended, answer
            self.wholes[question.number] = answer

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.balancer.run, self.client)
            for number in range(CLIENTS):
                nursery.start_soon(self._ask_for_ever, number)

    async def _ask_for_ever(self, number: int) -> None:
        dice = Random(number)
        for count in itertools.count():
            while not self.balancer.serving:
                await trio.sleep(LOOK_S)
            url = dice.choice(sorted(self.balancer.serving))
            question, is_streamed = dice.choice(QUESTIONS), bool(dice.getrandbits(1))
            request_id = f"load-{number}-{count}"
            answer, known = await ask_in_time(
                self.client, url, question, request_id=request_id, is_streamed=is_streamed
            )
            outcome = known or judged(answer, self.wholes[question.number])
            self.counts[outcome] = self.counts.get(outcome, 0) + 1
            if outcome is not Outcome.RIGHT:
                said = answer.error or answer.broken or answer.status
                self.bad.append(f"{outcome}: {request_id} at {url}: {said}")

    async def wait_more(self, count: int) -> None:
        """Until so many more whole answers have come."""
        wanted = self.right + count
        with trio.fail_after(300):
            while self.right < wanted:
                await trio.sleep(0.1)


@asynccontextmanager
async def open_clients(urls: list[str], *, ca_file: Path, key: str) -> AsyncIterator[Clients]:
    more = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        verify=ssl.create_default_context(cafile=str(ca_file)),
        timeout=None,
        headers=more,
        trust_env=False,
    ) as client:
        yield Clients(urls, client)
