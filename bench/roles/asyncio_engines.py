"""Engines that compute nothing, for the peers that run on asyncio: twins of trinamo's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from commands import IDLE_STEP_S, PHASE_S, STEP_S, TOKEN


class RpcEngine:
    """The same handlers as trinamo's worker has."""

    def __init__(self) -> None:
        self.step = asyncio.Event()
        self.paced_count = 0
        self.turns: deque[asyncio.Event] = deque()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S if self.paced_count else IDLE_STEP_S)
            step, self.step = self.step, asyncio.Event()
            step.set()

    async def run_phases(self) -> None:
        while True:
            await asyncio.sleep(PHASE_S if self.turns else IDLE_STEP_S)
            if self.turns:
                self.turns.popleft().set()

    async def tokens(self, count: int, context: object) -> AsyncIterator[str]:
        for _number in range(count):
            yield TOKEN

    async def paced(self, count: int, context: object) -> AsyncIterator[str]:
        self.paced_count += 1
        try:
            for _number in range(count):
                await self.step.wait()
                yield TOKEN
        finally:
            self.paced_count -= 1

    async def phased(self, count: int, context: object) -> AsyncIterator[str]:
        for _number in range(count):
            turn = asyncio.Event()
            self.turns.append(turn)
            await turn.wait()
            yield TOKEN

    async def echo(self, text: str, context: object) -> str:
        return text


def tokens_of(asked: dict) -> int:
    """How many tokens a request wants; a router may have renamed the field."""
    return asked.get("max_tokens") or asked["max_completion_tokens"]


class HttpEngine:
    """What a request over HTTP asks for: tokens at once, all streams in the same instant, or by itself."""

    def __init__(self) -> None:
        self.step = asyncio.Event()
        self.step_s = 0.0
        self.count = 0

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            due = max(due + (self.step_s if self.count else IDLE_STEP_S), clock())
            await asyncio.sleep(due - clock())
            step, self.step = self.step, asyncio.Event()
            step.set()

    async def tokens(self, asked: dict) -> AsyncIterator[int]:
        """The numbers of the tokens, each when it is due."""
        pause_s = round(asked.get("temperature") or 0, 6)
        by_itself = asked.get("seed")
        self.count += 1
        self.step_s = pause_s
        try:
            for number in range(tokens_of(asked)):
                if by_itself:
                    await asyncio.sleep(pause_s)
                elif pause_s:
                    await self.step.wait()
                yield number
        finally:
            self.count -= 1
