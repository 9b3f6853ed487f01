"""Numbered events, the worker's end: a publisher that answers for its snapshot.

It numbers what it publishes, beats while it has nothing to say, so that the loss of the last event
shows too, and answers requests for a snapshot. What is in the events is theirs who own them
(`kv/events.py`, `load.py`); the other end is `follower.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import trio

from ..errors import RemoteProtocolError, TrinamoError
from ..logs.notices import LogNotices
from ..nurseries import open_nursery
from ..planes import EventPlane, Message
from ..planes.retries import Retries
from ..protocol.discovery.instances import EndpointName
from ..protocol.events.sequence import (
    SequencedEvent,
    SequencedSnapshot,
    SnapshotRequest,
    decode_request,
    encode_event,
    encode_snapshot,
)

_TOPICS: Final = "trinamo."
"""Begins every topic."""


def topic_of(kind: str, endpoint: EndpointName) -> str:
    """The topic under which an endpoint's instances publish events of `kind`."""
    # A name may contain dots, which separate tokens in a subject.
    parts = (endpoint.namespace, endpoint.component, endpoint.endpoint)
    return f"{_TOPICS}{kind}." + ".".join(part.replace(".", "%2E") for part in parts)


def event_subject(topic: str, publisher: str) -> str:
    return f"{topic}.event.{publisher}"


def snapshot_subject(topic: str, publisher: str) -> str:
    return f"{topic}.snapshot.{publisher}"


def _request_in(message: Message) -> SnapshotRequest:
    """`RemoteProtocolError` for what is none, or wants its answer on a topic: sealed for that, it would be an event."""
    if message.reply.startswith(_TOPICS):
        raise RemoteProtocolError("its answer would be an event")
    return decode_request(message.payload)


_log = logging.getLogger("trinamo.events")


class EventSource:
    """One publisher's numbered events under `topic`.

    `snapshot(part, parts)` returns all that the events so far add up to, or of a state larger than
    a message the given part; it is called without a checkpoint between it and the number it is
    sent with, so it must change with the very call that publishes.
    """

    def __init__(
        self,
        events: EventPlane,
        topic: str,
        *,
        publisher: str,
        incarnation: int,
        snapshot: Callable[[int, int], bytes],
        beat_s: float = 1.0,
    ) -> None:
        self._events = events
        self._topic = topic
        self._publisher = publisher
        self._incarnation = incarnation
        self._snapshot = snapshot
        self._beat_s = beat_s
        self.sequence = 0
        """The number of the last event."""
        self.dropped = 0
        """Events that did not go to the broker; followers see the gap."""
        self.snapshot_count = 0
        """Answers to requests for a snapshot, every part counted."""
        self.malformed = 0
        """Requests that were none."""
        self._notices = LogNotices(_log)
        self._last_answer: tuple[SnapshotRequest, int, bytes] | None = None

    async def publish(self, body: bytes) -> None:
        """Number and send one event. The number is taken before anything is awaited.

        An event that the plane does not take, or a cancelled publish, is a gap to the followers,
        who then ask for a snapshot; so this raises nothing for it.
        """
        self.sequence += 1
        await self._send(body)

    def skip(self) -> None:
        """Something happened that will not be sent: a gap, as if the event had been lost."""
        self.sequence += 1
        self.dropped += 1

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer for the snapshot, and beat, until cancelled."""

        async def beat() -> None:
            while True:
                await trio.sleep(self._beat_s)
                await self._send(None)

        async with open_nursery() as nursery:
            nursery.start_soon(beat)
            retries = Retries(_log, f"{self._topic}: nobody can ask for a snapshot")
            await retries.run(self._serve, task_status=task_status)
            nursery.cancel_scope.cancel()

    async def _serve(self, begun: Callable[[], None]) -> None:
        subject = snapshot_subject(self._topic, self._publisher)
        async with self._events.subscribe(subject) as requests:
            begun()
            async for message in requests:
                if not message.reply:
                    continue
                try:
                    request = _request_in(message)
                    await self._events.publish(message.reply, self._answer_to(request))
                except RemoteProtocolError as error:
                    self.malformed += 1
                    self._notices.warn(f"{self._topic}: a request not understood", error)
                except TrinamoError as error:
                    self._notices.warn(f"{self._topic}: a snapshot could not be sent", error)
                else:
                    self.snapshot_count += 1

    def _answer_to(self, request: SnapshotRequest) -> bytes:
        # After an outage all followers ask at once, and nothing has changed between two of them.
        if self._last_answer is None or self._last_answer[:2] != (request, self.sequence):
            part, parts = request.part, request.parts
            answer = encode_snapshot(self._numbered(self._snapshot(part, parts), part, parts))
            bytes_max = self._events.message_bytes_max
            if len(answer) > bytes_max:
                # Half full when the parts are equal, as they are not, and the state grows meanwhile.
                parts *= 2 * len(answer) // bytes_max + 1
                answer = encode_snapshot(self._numbered(b"", 0, parts))
            self._last_answer = request, self.sequence, answer
        return self._last_answer[2]

    def _numbered(self, body: bytes, part: int, parts: int) -> SequencedSnapshot:
        return SequencedSnapshot(
            self._publisher, self._incarnation, self.sequence, body, part, parts
        )

    async def _send(self, body: bytes | None) -> None:
        event = SequencedEvent(self._publisher, self._incarnation, self.sequence, body)
        subject = event_subject(self._topic, self._publisher)
        try:
            await self._events.publish(subject, encode_event(event))
        except TrinamoError as error:
            self.dropped += body is not None
            self._notices.warn(f"{self._topic}: events are dropped", error)
