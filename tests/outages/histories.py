"""Writers, watchers and what they saw: the measure of an outage, for the tests and the benchmark.

A writer writes numbered keys or messages at a rate, and never the same number under two names; a
watcher notes what arrives. Afterwards the store itself says what was written, and `History` tells
what got lost on the way, what came twice, whether the order held, and how long nothing could be
written.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.planes import ControlPlane, EventPlane, Message, Put, Snapshot

ATTEMPT_S: Final = 1.0
RETRY_PAUSE_S: Final = 0.1
NO_SUITABLE_PEERS: Final = 10005


@attrs.define
class History:
    """One stream of writes and what one reader made of it."""

    acknowledged: list[str] = attrs.field(factory=list)
    failed: int = 0
    """Attempts that ended with an error, whatever came of them."""
    seen: list[str] = attrs.field(factory=list)
    revisions: list[int] = attrs.field(factory=list)
    gap_s: float = 0.0
    """The longest time from one acknowledgement to the next."""
    _last_at: float = 0.0

    def acknowledge(self, name: str) -> None:
        now = trio.current_time()
        if self.acknowledged:
            self.gap_s = max(self.gap_s, now - self._last_at)
        self._last_at = now
        self.acknowledged.append(name)

    def note(self, name: str, revision: int) -> None:
        self.seen.append(name)
        self.revisions.append(revision)

    def lost(self, written: Sequence[str] = ()) -> set[str]:
        """What was written, by the store's word or by its acknowledgement, and not seen."""
        return {*written, *self.acknowledged} - {*self.seen}

    @property
    def duplicated(self) -> int:
        return len(self.seen) - len({*self.seen})

    @property
    def is_ordered(self) -> bool:
        return self.revisions == sorted(self.revisions)


# --- the control plane -----------------------------------------------------------------------


async def write_keys(
    plane: ControlPlane,
    prefix: str,
    history: History,
    *,
    per_s: float = 50.0,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Create keys until cancelled. Each is written under a guard, so it may be tried again."""
    task_status.started()
    number = 0
    while True:
        name = f"{prefix}{number:06d}"
        try:
            await plane.compare_and_put(name, b"1", mod_revision=0)
        except TrinamoError:
            # Whether it took effect, the watch and the store will say; the next one is another.
            history.failed += 1
        else:
            history.acknowledge(name)
        number += 1
        await trio.sleep(1 / per_s)


async def watch_keys(
    plane: ControlPlane,
    prefix: str,
    history: History,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Note every key until cancelled; a `Resync` or a delete is a failure here."""
    async with plane.watch(prefix) as events:
        first = await anext(events)
        assert isinstance(first, Snapshot)
        task_status.started()
        async for event in events:
            assert isinstance(event, Put), event
            history.note(event.entry.key, event.entry.mod_revision)


async def caught_up(
    plane: ControlPlane, prefix: str, histories: Sequence[History], *, timeout_s: float = 300.0
) -> list[str]:
    """Wait until every reader has all that is in the store, and return that."""
    written: list[str] = []
    with trio.move_on_after(timeout_s):
        while True:
            try:
                written = [entry.key for entry in (await plane.range(prefix)).entries]
            except TrinamoError:
                await trio.sleep(RETRY_PAUSE_S)
                continue
            if not any(history.lost(written) for history in histories):
                break
            await trio.sleep(RETRY_PAUSE_S)
    return written


# --- a stream of messages kept by JetStream --------------------------------------------------


class StreamClient:
    """As much of JetStream as a test needs, over any event plane that can request."""

    def __init__(self, plane: EventPlane, name: str) -> None:
        self.name = name
        self.subject = f"{name}.jobs"
        self._plane = plane
        self._answers: dict[str, trio.Event] = {}
        self._replies: dict[str, Message] = {}
        self._inbox = f"_INBOX.{name}"

    async def ask(self, what: str, body: Any = None) -> dict[str, Any]:
        """One request to JetStream's API; tried again while nobody leads it."""
        payload = b"" if body is None else json.dumps(body).encode()
        while True:
            try:
                reply = await self._plane.request(f"$JS.API.{what}", payload, timeout_s=2)
            except TrinamoError:
                await trio.sleep(RETRY_PAUSE_S)
                continue
            answer: dict[str, Any] = json.loads(reply.payload)
            if answer.get("error", {}).get("code") not in (500, 503):
                return answer
            await trio.sleep(RETRY_PAUSE_S)

    async def create(self, *, replicas: int) -> None:
        """Make the stream; servers that have just met may not yet count each other as peers."""
        body = {"name": self.name, "subjects": [self.subject], "num_replicas": replicas}
        while "error" in (answer := await self.ask(f"STREAM.CREATE.{self.name}", body)):
            assert answer["error"]["err_code"] == NO_SUITABLE_PEERS, answer
            await trio.sleep(RETRY_PAUSE_S)

    async def leader(self) -> str:
        """The name of the server that leads the stream; waits until one does."""
        while True:
            info = await self.ask(f"STREAM.INFO.{self.name}")
            if name := str(info.get("cluster", {}).get("leader", "")):
                return name
            await trio.sleep(RETRY_PAUSE_S)

    async def move_to(self, server: str) -> None:
        """Make that server the stream's leader."""
        body = {"placement": {"preferred": server}}
        while await self.leader() != server:
            await self.ask(f"STREAM.LEADER.STEPDOWN.{self.name}", body)
            await trio.sleep(RETRY_PAUSE_S)

    async def stored(self) -> list[str]:
        """Every message of the stream, in its order."""
        info = await self.ask(f"STREAM.INFO.{self.name}")
        texts = []
        for sequence in range(1, info["state"]["last_seq"] + 1):
            answer = await self.ask(f"STREAM.MSG.GET.{self.name}", {"seq": sequence})
            texts.append(answer["message"]["data"])
        return texts

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Take in the acknowledgements while inside."""
        async with (
            self._plane.subscribe(f"{self._inbox}.*") as replies,
            trio.open_nursery() as nursery,
        ):

            async def receive() -> None:
                async for reply in replies:
                    token = reply.subject.rpartition(".")[2]
                    self._replies[token] = reply
                    if token in self._answers:
                        self._answers[token].set()

            nursery.start_soon(receive)
            yield
            nursery.cancel_scope.cancel()

    async def put(self, number: int, history: History) -> None:
        """Store one message, again and again until it is acknowledged; its id makes it one."""
        token = f"{number}"
        while True:
            self._answers[token] = answered = trio.Event()
            try:
                await self._plane.publish(
                    self.subject,
                    token.encode(),
                    reply=f"{self._inbox}.{token}",
                    headers={"Nats-Msg-Id": token},
                )
                with trio.move_on_after(ATTEMPT_S):
                    await answered.wait()
            except TrinamoError:
                pass
            reply = self._replies.pop(token, None)
            if reply is not None and reply.payload and b'"error"' not in reply.payload:
                history.acknowledge(token)
                history.note(token, json.loads(reply.payload)["seq"])
                return
            history.failed += 1
            await trio.sleep(RETRY_PAUSE_S)

    async def write(self, history: History, *, per_s: float = 50.0) -> None:
        """Store numbered messages until cancelled, one after the other."""
        number = 0
        while True:
            await self.put(number, history)
            number += 1
            await trio.sleep(1 / per_s)
