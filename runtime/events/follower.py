"""Numbered events, the other end: applied in order, and a snapshot asked for when one is missing.

The publisher's end is `source.py`; the rules are in `protocol/events/sequence.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Final, Generic, TypeVar

import attrs
import msgspec
import trio

from ..errors import OverloadedError, RemoteProtocolError, TrinamoError
from ..logs.notices import LogNotices
from ..nurseries import open_nursery
from ..planes import EventPlane
from ..planes.retries import Retries
from ..protocol.events.sequence import (
    SequenceCounts,
    SequencedEvent,
    SequencedView,
    SequenceStep,
    SnapshotAssembly,
    Trouble,
    WholeSnapshot,
    decode_event,
    decode_snapshot,
    encode_request,
)
from ..protocol.undecodable import decoded
from .source import event_subject, snapshot_subject

_log = logging.getLogger("trinamo.events")
SNAPSHOTS_AT_ONCE: Final = 8
RETRY_S: Final = (0.1, 2.0)
_LINE_MAX: Final = 200
_ANSWER_S: Final = 2.0
CALM_S: Final = 4.0
"""A publisher that gave no trouble for so long is asked at once when it does."""


@attrs.define(eq=False)
class _Followed:
    view: SequencedView
    heard_at: float = -math.inf
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
    seconds. With `asks_first` nothing of a publisher counts before it has answered once: where
    discovery does not say who lives.
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
        asks_first: bool = False,
    ) -> None:
        self.counts = SequenceCounts()
        self._asks_first = asks_first
        self._events = events
        self._topic = topic
        self._on_event = on_event
        self._on_snapshot = on_snapshot
        self._on_lost = on_lost
        self._follows = follows
        self._publishers_max = publishers_max
        self._pending_max = pending_max
        self._followed: dict[str, _Followed] = {}
        self._asking = trio.CapacityLimiter(SNAPSHOTS_AT_ONCE)
        self._notices = LogNotices(_log)
        self.ignored = 0
        """Events of publishers beyond `publishers_max`."""
        self.unknown = 0
        """Events of publishers that we do not follow."""
        self.snapshot_count = 0
        """Snapshots taken."""
        self.malformed = 0
        """Messages and bodies that made no sense."""

    @property
    def lost_count(self) -> int:
        """Publishers that a snapshot is being asked of now."""
        return sum(followed.view.needs_snapshot for followed in self._followed.values())

    def silent(self, since: float) -> list[str]:
        """Publishers of which nothing has come, not even a beat, since that time of trio's clock."""
        return [name for name, each in self._followed.items() if each.heard_at < since]

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
        pattern = event_subject(self._topic, "*")
        async with self._events.subscribe(pattern, pending_max=self._pending_max) as messages:
            begun()
            async for message in messages:
                try:
                    event = decode_event(message.payload)
                except RemoteProtocolError as error:
                    self._refuse(f"on {message.subject}: {error}")
                    continue
                if message.subject == event_subject(self._topic, event.publisher):
                    self._receive(event, nursery)
                else:
                    self._refuse(f"on {message.subject}: an event of {event.publisher:.80}")

    def _refuse(self, what: str) -> None:
        self.malformed += 1
        # Some of it is a stranger's text.
        self._notices.warn(f"{self._topic}: not understood", what[:_LINE_MAX])

    def _receive(self, event: SequencedEvent, nursery: trio.Nursery) -> None:
        publisher = event.publisher
        followed = self._followed.get(publisher)
        if followed is None:
            if not self._follows(publisher):
                self.unknown += 1
                # Often one that discovery will tell of in a moment.
                kind = f"{self._topic}: not followed"
                self._notices.log(logging.DEBUG, kind, publisher[:_LINE_MAX])
                return
            if len(self._followed) >= self._publishers_max:
                self.ignored += 1
                self._notices.warn(f"{self._topic}: too many publishers", publisher[:_LINE_MAX])
                return
            view = SequencedView(self.counts, asks_first=self._asks_first)
            followed = self._followed[publisher] = _Followed(view)
        followed.heard_at = trio.current_time()
        self._apply(publisher, followed, followed.view.receive(event))
        if followed.view.trouble:
            # A gap is what a broker that was away looks like; the others are somebody's mistake.
            trouble = followed.view.trouble
            level = logging.INFO if trouble is Trouble.GAP else logging.WARNING
            what = f"{publisher[:_LINE_MAX]} at {event.incarnation}/{event.sequence}"
            self._notices.log(level, f"{self._topic}: {trouble}", what)
        if followed.view.needs_snapshot and not followed.is_asking:
            followed.is_asking = True
            nursery.start_soon(self._ask, publisher, followed)

    def _apply(self, publisher: str, followed: _Followed, step: SequenceStep) -> None:
        try:
            if step.snapshot is not None:
                self.snapshot_count += 1
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
                        try:
                            snapshot = await self._fetch(publisher)
                        except (RemoteProtocolError, OverloadedError) as error:
                            self._refuse(f"{publisher}: {error}")
                        except TrinamoError as error:
                            _log.debug("%s: no snapshot of %s: %s", self._topic, publisher, error)
                        else:
                            if self._followed.get(publisher) is followed:
                                self._apply(
                                    publisher, followed, followed.view.take_snapshot(snapshot)
                                )
        finally:
            followed.is_asking = False

    async def _pace(self, followed: _Followed) -> None:
        """At once the first time, then at growing intervals while there is no calm."""
        shortest_s, longest_s = RETRY_S
        is_calm = trio.current_time() - followed.asked_at > CALM_S
        followed.wait_s = 0.0 if is_calm else min(max(2 * followed.wait_s, shortest_s), longest_s)
        await trio.sleep_until(max(followed.asked_at + followed.wait_s, trio.current_time()))
        followed.asked_at = trio.current_time()

    async def _fetch(self, publisher: str) -> WholeSnapshot:
        """All parts of a snapshot, each asked for within `_ANSWER_S`."""
        assembly = SnapshotAssembly(publisher)
        while True:
            reply = await self._events.request(
                snapshot_subject(self._topic, publisher),
                encode_request(assembly.request),
                timeout_s=_ANSWER_S,
            )
            whole = assembly.take(decode_snapshot(reply.payload))
            if whole is not None:
                return whole


T = TypeVar("T")


class ReportFollower(Generic[T]):
    """Hands each report of an instance that `follows` names to `take(instance_id, report)`.

    `topic` is that of the reports, each a MessagePack `report_type`; what does not decode is an
    event that makes no sense, and counted by `follower`.
    """

    def __init__(
        self,
        events: EventPlane,
        topic: str,
        report_type: type[T],
        *,
        follows: Callable[[str], bool],
        take: Callable[[str, T], None],
    ) -> None:
        self._decoder = msgspec.msgpack.Decoder(report_type)
        self._take = take
        self.follower = EventFollower(
            events,
            topic,
            on_event=self.receive,
            on_snapshot=self._receive_snapshot,
            follows=follows,
        )
        """What was missed, and counted."""

    def receive(self, instance_id: str, body: bytes) -> None:
        """Take one report as it was published; raises `RemoteProtocolError` for nonsense."""
        report = decoded(self._decoder.decode, body, "not a report")
        self._take(instance_id, report)

    def _receive_snapshot(self, instance_id: str, bodies: tuple[bytes, ...]) -> None:
        for body in bodies:
            self.receive(instance_id, body)
