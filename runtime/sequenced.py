"""Numbered events between processes: a publisher that answers for its snapshot, and a follower.

`EventSource` is the worker's end: it numbers what it publishes, beats while it has nothing to say
so that the loss of the last event shows too, and answers requests for a snapshot. `EventFollower`
is the other end: it applies events in order and asks for a snapshot as soon as it has missed one.
What is in the events is theirs who own them (KV events, load). The rules are in
`protocol/sequence.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import attrs
import trio

from .errors import ConnectError, OverloadedError, RemoteProtocolError, TrinamoError
from .planes import EventPlane
from .protocol.sequence import (
    SequenceCounts,
    SequencedEvent,
    SequencedSnapshot,
    SequencedView,
    Step,
    decode_event,
    decode_snapshot,
    encode_event,
    encode_snapshot,
)

__all__ = ["EventFollower", "EventSource"]

_log = logging.getLogger("trinamo.events")
SNAPSHOTS_AT_ONCE: Final = 8
RETRY_S: Final = (0.1, 2.0)


def _event_subject(topic: str, publisher: str) -> str:
    return f"{topic}.event.{publisher}"


def _snapshot_subject(topic: str, publisher: str) -> str:
    return f"{topic}.snapshot.{publisher}"


class EventSource:
    """One publisher's numbered events under `topic`.

    `snapshot` returns all that the events so far add up to; it is called without a checkpoint
    between it and the number it is sent with, so it must change with the very call that publishes.
    """

    def __init__(
        self,
        events: EventPlane,
        topic: str,
        *,
        publisher: str,
        incarnation: int,
        snapshot: Callable[[], bytes],
        beat_s: float = 1.0,
    ) -> None:
        self._events = events
        self._topic = topic
        self._publisher = publisher
        self._incarnation = incarnation
        self._snapshot = snapshot
        self._beat_s = beat_s
        self._sequence = 0
        self._dropped = 0

    @property
    def sequence(self) -> int:
        """The number of the last event."""
        return self._sequence

    @property
    def dropped(self) -> int:
        """Events that could not be queued for the broker; followers see the gap."""
        return self._dropped

    async def publish(self, body: bytes) -> None:
        """Number and send one event. The number is taken before anything is awaited.

        An event that the plane does not take, or a cancelled publish, is a gap to the followers,
        who then ask for a snapshot; so this raises nothing for it.
        """
        self._sequence += 1
        await self._send(body)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer for the snapshot, and beat, until cancelled."""
        subject = _snapshot_subject(self._topic, self._publisher)
        async with self._events.subscribe(subject) as requests, trio.open_nursery() as nursery:
            nursery.start_soon(self._beat)
            task_status.started()
            async for request in requests:
                if request.reply:
                    await self._answer(request.reply)

    async def _answer(self, reply: str) -> None:
        snapshot = SequencedSnapshot(
            self._publisher, self._incarnation, self._sequence, self._snapshot()
        )
        try:
            await self._events.publish(reply, encode_snapshot(snapshot))
        except TrinamoError as error:
            _log.warning("%s: a snapshot could not be sent: %s", self._topic, error)

    async def _beat(self) -> None:
        while True:
            await trio.sleep(self._beat_s)
            await self._send(None)

    async def _send(self, body: bytes | None) -> None:
        event = SequencedEvent(self._publisher, self._incarnation, self._sequence, body)
        try:
            await self._events.publish(
                _event_subject(self._topic, self._publisher), encode_event(event)
            )
        except (OverloadedError, ConnectError) as error:
            self._dropped += body is not None
            _log.debug("%s: an event was dropped: %s", self._topic, error)


@attrs.define(eq=False)
class _Followed:
    view: SequencedView
    is_asking: bool = False


class EventFollower:
    """Follows every publisher under `topic`.

    `on_event(publisher, body)` and `on_snapshot(publisher, body)` are called in order; a snapshot
    replaces all that came before, and an empty one means: nothing yet. At most `publishers_max` are
    followed; others are counted and ignored until one is forgotten.
    """

    def __init__(
        self,
        events: EventPlane,
        topic: str,
        *,
        on_event: Callable[[str, bytes], None],
        on_snapshot: Callable[[str, bytes], None],
        publishers_max: int = 4096,
        pending_max: int = 65_536,
        timeout_s: float = 2.0,
    ) -> None:
        self.counts = SequenceCounts()
        self._events = events
        self._topic = topic
        self._on_event = on_event
        self._on_snapshot = on_snapshot
        self._publishers_max = publishers_max
        self._pending_max = pending_max
        self._timeout_s = timeout_s
        self._followed: dict[str, _Followed] = {}
        self._asking = trio.CapacityLimiter(SNAPSHOTS_AT_ONCE)
        self._ignored = 0
        self._snapshot_count = 0
        self._malformed = 0

    @property
    def ignored(self) -> int:
        """Events of publishers beyond `publishers_max`."""
        return self._ignored

    @property
    def malformed(self) -> int:
        """Messages that were no events."""
        return self._malformed

    @property
    def snapshot_count(self) -> int:
        """Snapshots taken."""
        return self._snapshot_count

    def forget(self, publisher: str) -> None:
        """The publisher has left; should it come again, it is followed from a snapshot."""
        self._followed.pop(publisher, None)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow until cancelled. While the broker is away, what is known stays known."""
        pattern = _event_subject(self._topic, "*")
        async with (
            self._events.subscribe(pattern, pending_max=self._pending_max) as messages,
            trio.open_nursery() as nursery,
        ):
            task_status.started()
            async for message in messages:
                try:
                    event = decode_event(message.payload)
                except RemoteProtocolError as error:
                    self._malformed += 1
                    _log.warning("%s: %s", message.subject, error)
                    continue
                if message.subject != _event_subject(self._topic, event.publisher):
                    self._malformed += 1
                    _log.warning("%s: an event of %.80r", message.subject, event.publisher)
                    continue
                self._receive(event, nursery)

    def _receive(self, event: SequencedEvent, nursery: trio.Nursery) -> None:
        followed = self._followed.get(event.publisher)
        if followed is None:
            if len(self._followed) >= self._publishers_max:
                self._ignored += 1
                return
            followed = self._followed[event.publisher] = _Followed(SequencedView(self.counts))
        self._apply(event.publisher, followed.view.receive(event))
        if followed.view.needs_snapshot and not followed.is_asking:
            followed.is_asking = True
            nursery.start_soon(self._ask, event.publisher, followed)

    def _apply(self, publisher: str, step: Step) -> None:
        if step.snapshot is not None:
            self._snapshot_count += 1
            self._on_snapshot(publisher, step.snapshot)
        for body in step.events:
            self._on_event(publisher, body)

    async def _ask(self, publisher: str, followed: _Followed) -> None:
        """Ask for snapshots until one closes the gap, or the publisher is forgotten."""
        wait_s, wait_s_max = RETRY_S
        try:
            while not await self._ask_once(publisher, followed):
                await trio.sleep(wait_s)
                wait_s = min(2 * wait_s, wait_s_max)
        finally:
            followed.is_asking = False

    async def _ask_once(self, publisher: str, followed: _Followed) -> bool:
        """Whether there is nothing more to ask for."""
        try:
            async with self._asking:
                reply = await self._events.request(
                    _snapshot_subject(self._topic, publisher), b"", timeout_s=self._timeout_s
                )
            snapshot = decode_snapshot(reply.payload)
        except TrinamoError as error:
            _log.debug("%s: no snapshot of %s: %s", self._topic, publisher, error)
            return self._followed.get(publisher) is not followed
        if self._followed.get(publisher) is not followed:
            return True
        if snapshot.publisher != publisher:
            _log.warning("%s: %s answered for %s", self._topic, snapshot.publisher, publisher)
            return False
        self._apply(publisher, followed.view.take_snapshot(snapshot))
        return not followed.view.needs_snapshot
