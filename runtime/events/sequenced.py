"""Numbered events between processes: a publisher that answers for its snapshot, and a follower.

`EventSource` is the worker's end: it numbers what it publishes, beats while it has nothing to say
so that the loss of the last event shows too, and answers requests for a snapshot. `EventFollower`
is the other end: it applies events in order and asks for a snapshot as soon as it has missed one.
What is in the events is theirs who own them (`kv/events.py`, `load.py`). The rules are in
`protocol/events/sequence.py` and `protocol/events/snapshot.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Final

import attrs
import trio

from ..errors import OverloadedError, RemoteProtocolError, TrinamoError
from ..logs.notices import LogNotices
from ..nurseries import open_nursery
from ..planes import EventPlane, Message
from ..protocol.discovery.instances import EndpointName
from ..protocol.events.sequence import (
    SequenceCounts,
    SequencedEvent,
    SequencedView,
    Step,
    Trouble,
    decode_event,
    encode_event,
)
from ..protocol.events.snapshot import (
    SequencedSnapshot,
    SnapshotAssembly,
    SnapshotRequest,
    WholeSnapshot,
    decode_request,
    decode_snapshot,
    encode_request,
    encode_snapshot,
)
from ..retries import Retries

__all__ = ["EventFollower", "EventSource", "topic_of"]

_log = logging.getLogger("trinamo.events")
SNAPSHOTS_AT_ONCE: Final = 8
RETRY_S: Final = (0.1, 2.0)
_LINE_MAX: Final = 200
CALM_S: Final = 4.0
"""A publisher that gave no trouble for so long is asked at once when it does."""


def topic_of(kind: str, endpoint: EndpointName) -> str:
    """The topic under which an endpoint's instances publish events of `kind`."""
    # A name may contain dots, which separate tokens in a subject.
    parts = (endpoint.namespace, endpoint.component, endpoint.endpoint)
    return f"trinamo.{kind}." + ".".join(part.replace(".", "%2E") for part in parts)


def _event_subject(topic: str, publisher: str) -> str:
    return f"{topic}.event.{publisher}"


def _snapshot_subject(topic: str, publisher: str) -> str:
    return f"{topic}.snapshot.{publisher}"


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
        self._sequence = 0
        self._dropped = 0
        self._snapshot_count = 0
        self._malformed = 0
        self._notices = LogNotices(_log)
        self._last_answer: tuple[SnapshotRequest, int, bytes] | None = None

    @property
    def sequence(self) -> int:
        """The number of the last event."""
        return self._sequence

    @property
    def dropped(self) -> int:
        """Events that did not go to the broker; followers see the gap."""
        return self._dropped

    @property
    def snapshot_count(self) -> int:
        """Answers to requests for a snapshot, every part counted."""
        return self._snapshot_count

    @property
    def malformed(self) -> int:
        """Requests that were none."""
        return self._malformed

    async def publish(self, body: bytes) -> None:
        """Number and send one event. The number is taken before anything is awaited.

        An event that the plane does not take, or a cancelled publish, is a gap to the followers,
        who then ask for a snapshot; so this raises nothing for it.
        """
        self._sequence += 1
        await self._send(body)

    def skip(self) -> None:
        """Something happened that will not be sent: a gap, as if the event had been lost."""
        self._sequence += 1
        self._dropped += 1

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer for the snapshot, and beat, until cancelled."""
        async with open_nursery() as nursery:
            nursery.start_soon(self._beat)
            retries = Retries(_log, f"{self._topic}: nobody can ask for a snapshot")
            await retries.run(self._serve, task_status=task_status)
            nursery.cancel_scope.cancel()

    async def _serve(self, begun: Callable[[], None]) -> None:
        subject = _snapshot_subject(self._topic, self._publisher)
        async with self._events.subscribe(subject) as requests:
            begun()
            async for request in requests:
                if request.reply:
                    await self._answer(request)

    async def _answer(self, message: Message) -> None:
        try:
            request = decode_request(message.payload)
            await self._events.publish(message.reply, self._answer_to(request))
        except RemoteProtocolError as error:
            self._malformed += 1
            self._notices.warn(f"{self._topic}: a request not understood", error)
        except TrinamoError as error:
            self._notices.warn(f"{self._topic}: a snapshot could not be sent", error)
        else:
            self._snapshot_count += 1

    def _answer_to(self, request: SnapshotRequest) -> bytes:
        # After an outage all followers ask at once, and nothing has changed between two of them.
        if self._last_answer is None or self._last_answer[:2] != (request, self._sequence):
            self._last_answer = request, self._sequence, self._make_answer(request)
        return self._last_answer[2]

    def _make_answer(self, request: SnapshotRequest) -> bytes:
        part, parts = request.part, request.parts
        body = self._snapshot(part, parts)
        whole = encode_snapshot(self._numbered(body, part, parts))
        bytes_max = self._events.message_bytes_max
        if len(whole) <= bytes_max:
            return whole
        # Half full when the parts are equal, as they are not, and the state grows meanwhile.
        return encode_snapshot(self._numbered(b"", 0, parts * (2 * len(whole) // bytes_max + 1)))

    def _numbered(self, body: bytes, part: int, parts: int) -> SequencedSnapshot:
        return SequencedSnapshot(
            self._publisher, self._incarnation, self._sequence, body, part, parts
        )

    async def _beat(self) -> None:
        while True:
            await trio.sleep(self._beat_s)
            await self._send(None)

    async def _send(self, body: bytes | None) -> None:
        event = SequencedEvent(self._publisher, self._incarnation, self._sequence, body)
        subject = _event_subject(self._topic, self._publisher)
        try:
            await self._events.publish(subject, encode_event(event))
        except TrinamoError as error:
            self._dropped += body is not None
            self._notices.warn(f"{self._topic}: events are dropped", error)


@attrs.define(eq=False)
class _Followed:
    view: SequencedView
    is_whole: bool = True
    """Whether `on_lost` is still to be called for the next loss."""
    is_asking: bool = False
    asked_at: float = -math.inf
    wait_s: float = 0.0


class EventFollower:
    """Follows the publishers under `topic` for which `follows(publisher)` is true.

    `on_event(publisher, body)` and `on_snapshot(publisher, bodies)` are called in order; a snapshot
    replaces all that came before, and one without bodies means: nothing yet. What either refuses
    with `RemoteProtocolError` counts as missed. `on_lost(publisher)` says that what was told so far
    may be wrong; a snapshot follows as soon as there is one.

    At most `publishers_max` are followed; others are counted and ignored until one is forgotten. A
    publisher that is in trouble again and again is asked more and more rarely, down to every two
    seconds.
    """

    def __init__(
        self,
        events: EventPlane,
        topic: str,
        *,
        on_event: Callable[[str, bytes], None],
        on_snapshot: Callable[[str, tuple[bytes, ...]], None],
        on_lost: Callable[[str], None] = lambda _: None,
        follows: Callable[[str], bool] = lambda _: True,
        publishers_max: int = 4096,
        pending_max: int = 65_536,
        timeout_s: float = 2.0,
    ) -> None:
        self.counts = SequenceCounts()
        self._events = events
        self._topic = topic
        self._on_event = on_event
        self._on_snapshot = on_snapshot
        self._on_lost = on_lost
        self._follows = follows
        self._publishers_max = publishers_max
        self._pending_max = pending_max
        self._timeout_s = timeout_s
        self._followed: dict[str, _Followed] = {}
        self._asking = trio.CapacityLimiter(SNAPSHOTS_AT_ONCE)
        self._notices = LogNotices(_log)
        self._ignored = 0
        self._unknown = 0
        self._snapshot_count = 0
        self._malformed = 0

    @property
    def ignored(self) -> int:
        """Events of publishers beyond `publishers_max`."""
        return self._ignored

    @property
    def unknown(self) -> int:
        """Events of publishers that we do not follow."""
        return self._unknown

    @property
    def malformed(self) -> int:
        """Messages and bodies that made no sense."""
        return self._malformed

    @property
    def snapshot_count(self) -> int:
        """Snapshots taken."""
        return self._snapshot_count

    @property
    def lost_count(self) -> int:
        """Publishers that a snapshot is being asked of now."""
        return sum(followed.view.needs_snapshot for followed in self._followed.values())

    def forget(self, publisher: str) -> None:
        """The publisher has left; should it come again, it is followed from a snapshot."""
        followed = self._followed.pop(publisher, None)
        if followed is not None:
            followed.view.close()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow until cancelled. While the broker is away, what is known stays known."""
        async with open_nursery() as nursery:
            retries = Retries(_log, f"{self._topic} is not followed")
            await retries.run(partial(self._follow, nursery), task_status=task_status)
            nursery.cancel_scope.cancel()

    async def _follow(self, nursery: trio.Nursery, begun: Callable[[], None]) -> None:
        pattern = _event_subject(self._topic, "*")
        async with self._events.subscribe(pattern, pending_max=self._pending_max) as messages:
            begun()
            async for message in messages:
                self._take(message, nursery)

    def _take(self, message: Message, nursery: trio.Nursery) -> None:
        try:
            event = decode_event(message.payload)
        except RemoteProtocolError as error:
            self._refuse(f"on {message.subject}: {error}")
            return
        if message.subject != _event_subject(self._topic, event.publisher):
            self._refuse(f"on {message.subject}: an event of {event.publisher:.80}")
            return
        self._receive(event, nursery)

    def _refuse(self, what: str) -> None:
        self._malformed += 1
        # Some of it is a stranger's text.
        self._notices.warn(f"{self._topic}: not understood", what[:_LINE_MAX])

    def _receive(self, event: SequencedEvent, nursery: trio.Nursery) -> None:
        publisher = event.publisher
        followed = self._followed.get(publisher)
        if followed is None:
            if not self._follows(publisher):
                self._unknown += 1
                # Often one that discovery will tell of in a moment.
                kind = f"{self._topic}: not followed"
                self._notices.log(logging.DEBUG, kind, publisher[:_LINE_MAX])
                return
            if len(self._followed) >= self._publishers_max:
                self._ignored += 1
                self._notices.warn(f"{self._topic}: too many publishers", publisher[:_LINE_MAX])
                return
            followed = self._followed[publisher] = _Followed(SequencedView(self.counts))
        self._apply(publisher, followed, followed.view.receive(event))
        if followed.view.trouble:
            self._tell(followed.view.trouble, event)
        if followed.view.needs_snapshot and not followed.is_asking:
            followed.is_asking = True
            nursery.start_soon(self._ask, publisher, followed)

    def _tell(self, trouble: Trouble, event: SequencedEvent) -> None:
        # A gap is what a broker that was away looks like; the others are somebody's mistake.
        level = logging.INFO if trouble is Trouble.GAP else logging.WARNING
        what = f"{event.publisher[:_LINE_MAX]} at {event.incarnation}/{event.sequence}"
        self._notices.log(level, f"{self._topic}: {trouble}", what)

    def _apply(self, publisher: str, followed: _Followed, step: Step) -> None:
        try:
            if step.snapshot is not None:
                self._snapshot_count += 1
                self._on_snapshot(publisher, step.snapshot)
                followed.is_whole = True
            for body in step.events:
                self._on_event(publisher, body)
        except RemoteProtocolError as error:
            self._refuse(f"{publisher}: {error}")
            followed.view.lose()
        if followed.view.needs_snapshot and followed.is_whole:
            followed.is_whole = False
            self._on_lost(publisher)

    async def _ask(self, publisher: str, followed: _Followed) -> None:
        """Ask for snapshots until one closes the gap, or the publisher is forgotten."""
        try:
            while self._followed.get(publisher) is followed and followed.view.needs_snapshot:
                await self._pace(followed)
                async with self._asking:
                    if self._followed.get(publisher) is followed:
                        await self._ask_once(publisher, followed)
        finally:
            followed.is_asking = False

    async def _pace(self, followed: _Followed) -> None:
        """At once the first time, then at growing intervals while there is no calm."""
        shortest_s, longest_s = RETRY_S
        is_calm = trio.current_time() - followed.asked_at > CALM_S
        followed.wait_s = 0.0 if is_calm else min(max(2 * followed.wait_s, shortest_s), longest_s)
        await trio.sleep_until(max(followed.asked_at + followed.wait_s, trio.current_time()))
        followed.asked_at = trio.current_time()

    async def _ask_once(self, publisher: str, followed: _Followed) -> None:
        try:
            snapshot = await self._fetch(publisher)
        except (RemoteProtocolError, OverloadedError) as error:
            self._refuse(f"{publisher}: {error}")
        except TrinamoError as error:
            _log.debug("%s: no snapshot of %s: %s", self._topic, publisher, error)
        else:
            if self._followed.get(publisher) is followed:
                self._apply(publisher, followed, followed.view.take_snapshot(snapshot))

    async def _fetch(self, publisher: str) -> WholeSnapshot:
        """All parts of a snapshot, each asked for within `timeout_s`."""
        assembly = SnapshotAssembly(publisher)
        while True:
            reply = await self._events.request(
                _snapshot_subject(self._topic, publisher),
                encode_request(assembly.request),
                timeout_s=self._timeout_s,
            )
            whole = assembly.take(decode_snapshot(reply.payload))
            if whole is not None:
                return whole
