"""What prefill and decode hosts tell each other about a request, over the message bus.

Words may be lost where links are cut, or reach a process that is not the one they were meant for;
so every wait for one has a bound, and a word for a request that nobody serves goes to `on_stray`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import attrs
import trio

from ..net.bus import Bus

__all__ = ["Inbox", "Mail", "Word"]

CHANNEL: Final = "kv"
WORDS_MAX: Final = 8
"""How many words of one request may wait; there are never so many kinds."""


@attrs.frozen(kw_only=True)
class Word:
    """One word about one request."""

    kind: str
    """`ask`; `ready`, `failed`; `granted`; `done`, `drop`."""
    request: str
    source: str
    body: Any = None


class Inbox:
    """The words about one request, in order."""

    def __init__(self) -> None:
        self.put, self._words = trio.open_memory_channel[Word](WORDS_MAX)

    async def word(self, wait_s: float) -> Word | None:
        """The next word; None if there is none within `wait_s`."""
        with trio.move_on_after(wait_s):
            return await self._words.receive()
        return None


class Mail:
    """The words of one host. `on_ask` and `on_stray` get those of requests without an inbox."""

    def __init__(self, bus: Bus, host: str) -> None:
        self.host = host
        self.on_ask: Callable[[Word], None] = lambda _: None
        self.on_stray: Callable[[Word], None] = lambda _: None
        self._bus = bus
        self._inboxes: dict[str, Inbox] = {}

    def post(self, to: str, kind: str, request: str, body: Any = None) -> None:
        """Send a word; it may be lost."""
        word = Word(kind=kind, request=request, source=self.host, body=body)
        self._bus.send(self.host, to, CHANNEL, word)

    @contextmanager
    def inbox(self, request: str) -> Iterator[Inbox]:
        """Take the words about `request` until the block is left."""
        inbox = self._inboxes[request] = Inbox()
        try:
            yield inbox
        finally:
            del self._inboxes[request]

    async def run(self) -> None:
        """Hand out what comes over the bus until cancelled."""
        while True:
            self.take((await self._bus.receive(CHANNEL)).payload)

    def take(self, word: Word) -> None:
        """Hand out one word; one too many for its inbox is dropped, as if it had been lost."""
        inbox = self._inboxes.get(word.request)
        if word.kind == "ask":
            self.on_ask(word)
        elif inbox is None:
            self.on_stray(word)
        else:
            with suppress(trio.WouldBlock):
                inbox.put.send_nowait(word)
