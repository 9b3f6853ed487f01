"""Events that must not be missed over a plane that may lose them: numbers, gaps, snapshots.

Sans-IO. A publisher numbers its events from 1 and puts its incarnation beside the number. Whoever
follows it keeps a `SequencedView`: in order, events are applied; as soon as something is wrong (a
number is missing, or goes back, or a new incarnation began) it needs a snapshot, and what arrives
meanwhile waits in a bounded buffer. `events/source.py` and `events/follower.py` are the pumps.

One request for a snapshot has one answer. If the snapshot is larger than a message the answer says in
how many parts to ask for it, and nothing is kept for that at the publisher: each part is what is true
when it is asked for. The events after the first part are applied to all of them once more, so a
state that is told in parts must bear that (`protocol/kv/events.py` says how).
"""

from __future__ import annotations

import enum
from typing import Final

import attrs
import msgspec

from ...errors import OverloadedError, RemoteProtocolError
from ..undecodable import decoded

PARTS_MAX: Final = 64


class SnapshotRequest(msgspec.Struct, frozen=True, array_like=True):
    """Ask for `part` (from 0) of `parts`."""

    part: int = 0
    parts: int = 1


class SequencedSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """One part of all that is true at the publisher after its event `sequence`."""

    publisher: str
    incarnation: int
    sequence: int
    body: bytes
    part: int = 0
    parts: int = 1
    """If it is not what was asked for: ask for so many; there is no body then."""


@attrs.frozen
class WholeSnapshot:
    """All parts. `sequence` is the first one's: events after it may be in the others already."""

    publisher: str
    incarnation: int
    sequence: int
    bodies: tuple[bytes, ...]


encode_request: Final = msgspec.msgpack.Encoder().encode
encode_snapshot: Final = encode_request
encode_event: Final = encode_request
_request_decoder = msgspec.msgpack.Decoder(SnapshotRequest)
_snapshot_decoder = msgspec.msgpack.Decoder(SequencedSnapshot)


def decode_request(payload: bytes) -> SnapshotRequest:
    """Raises `RemoteProtocolError` for what is no request; more than `PARTS_MAX` parts are none."""
    request = decoded(_request_decoder.decode, payload, "not a request for a snapshot")
    if not 0 <= request.part < request.parts <= PARTS_MAX:
        raise RemoteProtocolError(f"a request for part {request.part} of {request.parts}")
    return request


def decode_snapshot(payload: bytes) -> SequencedSnapshot:
    """Raises `RemoteProtocolError` for what is no snapshot."""
    snapshot = decoded(_snapshot_decoder.decode, payload, "not a snapshot")
    if snapshot.sequence < 0 or snapshot.incarnation < 0:
        raise RemoteProtocolError(f"a snapshot at {snapshot.incarnation}/{snapshot.sequence}")
    return snapshot


class SnapshotAssembly:
    """One publisher's snapshot while it is being asked for."""

    def __init__(self, publisher: str) -> None:
        self._publisher = publisher
        self._parts = 1
        self._taken: list[SequencedSnapshot] = []

    @property
    def request(self) -> SnapshotRequest:
        return SnapshotRequest(len(self._taken), self._parts)

    def take(self, answer: SequencedSnapshot) -> WholeSnapshot | None:
        """The answer to `request`; None if there is more to ask for.

        Raises `OverloadedError` if the snapshot needs more than `PARTS_MAX` parts, and
        `RemoteProtocolError` for an answer that does not fit, as when the publisher began anew
        between two parts. Start with a new assembly then.
        """
        if answer.publisher != self._publisher:
            raise RemoteProtocolError(f"{answer.publisher:.80} answered for {self._publisher}")
        if answer.parts != self._parts:
            if answer.parts <= self._parts:
                raise RemoteProtocolError(f"{answer.parts} parts instead of {self._parts}")
            if answer.parts > PARTS_MAX:
                raise OverloadedError(
                    f"the snapshot of {self._publisher} needs {answer.parts} parts",
                    bound="PARTS_MAX",
                    value=PARTS_MAX,
                )
            self._parts = answer.parts
            self._taken.clear()
            return None
        last = self._taken[-1] if self._taken else answer
        if (
            answer.part != len(self._taken)
            or answer.incarnation != last.incarnation
            or answer.sequence < last.sequence
        ):
            raise RemoteProtocolError(f"the parts of {self._publisher}'s snapshot do not fit")
        self._taken.append(answer)
        if len(self._taken) < self._parts:
            return None
        first, bodies = self._taken[0], tuple(each.body for each in self._taken)
        return WholeSnapshot(first.publisher, first.incarnation, first.sequence, bodies)


BUFFERED_MAX: Final = 1024
BUFFERED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Over all views that share their counts."""
OUTDATED_EVENTS_MAX: Final = 8
OUTDATED_ANSWERS_MAX: Final = 5
"""So many in a row from an earlier incarnation, and nothing from the one known: it is the earlier
one that lives. The other was a mistake, or has died without a successor."""


class SequencedEvent(msgspec.Struct, frozen=True, array_like=True):
    """One event; a heartbeat if there is no body, and then `sequence` is that of the last event."""

    publisher: str
    incarnation: int
    sequence: int
    body: bytes | None


_event_decoder = msgspec.msgpack.Decoder(SequencedEvent)


def decode_event(payload: bytes) -> SequencedEvent:
    """Raises `RemoteProtocolError` for what is no event."""
    event = decoded(_event_decoder.decode, payload, "not a sequenced event")
    if event.sequence < (event.body is not None) or event.incarnation < 0:
        raise RemoteProtocolError(f"an event numbered {event.incarnation}/{event.sequence}")
    return event


class Trouble(enum.StrEnum):
    """What was wrong with an event, in words for the log."""

    NONE = ""
    GAP = "events were missed"
    BACKWARDS = "numbers go back"
    OUTDATED = "an earlier incarnation speaks"


@attrs.define
class SequenceCounts:
    """What went wrong so far, and what waits, over all views that share this."""

    gaps: int = 0
    duplicates: int = 0
    backwards: int = 0
    outdated: int = 0
    """Events and snapshots of an incarnation before the one known."""
    restarts: int = 0
    """Incarnations that followed another one of the same publisher."""
    overflowed: int = 0
    """Buffers given up because they were full."""
    buffered_bytes: int = 0
    """Bodies that wait for a snapshot now; at most `BUFFERED_BYTES_MAX`."""


@attrs.frozen
class SequenceStep:
    """What to do, in this order: forget all and take `snapshot`, if there is one; apply `events`."""

    events: tuple[bytes, ...] = ()
    snapshot: tuple[bytes, ...] | None = None
    """Its parts; none of them means: nothing yet."""


_NOTHING: Final = SequenceStep()


class SequencedView:
    """What one follower knows of one publisher. `needs_snapshot` says when to ask for one.

    From then until a snapshot is taken nothing is applied, and what was applied before may be
    wrong by now. With `asks_first` that is so from the first event on: its answer shows that the
    publisher lives, which a message that somebody repeats does not.
    """

    def __init__(
        self,
        counts: SequenceCounts | None = None,
        *,
        buffered_max: int = BUFFERED_MAX,
        asks_first: bool = False,
    ) -> None:
        self.counts = counts or SequenceCounts()
        self._asks_first = asks_first
        self.incarnation = -1
        self.sequence = 0
        self.needs_snapshot = False
        self.trouble = Trouble.NONE
        """What was wrong with the last event."""
        self._buffered: dict[int, bytes] = {}
        self._buffered_max = buffered_max
        self._outdated_events = 0
        self._outdated_answers = 0

    def receive(self, event: SequencedEvent) -> SequenceStep:
        self.trouble = Trouble.NONE
        if event.incarnation < self.incarnation:
            self.trouble = Trouble.OUTDATED
            self.counts.outdated += 1
            self._outdated_events += 1
            if self._outdated_events >= OUTDATED_EVENTS_MAX:
                # Who is alive? The answer to a request says so, an event need not.
                self.needs_snapshot = True
            return _NOTHING
        self._outdated_events = self._outdated_answers = 0
        if event.incarnation > self.incarnation:
            # Its first event is all there is to know; a later one means that we missed some.
            self._begin(event.incarnation)
            self.needs_snapshot = True
            if event.sequence == 1 and event.body is not None and not self._asks_first:
                self.needs_snapshot = False
                self.sequence = 1
                return SequenceStep((event.body,), snapshot=())
        if event.body is None:
            # A heartbeat: is the last event we know the last there is?
            if not self.needs_snapshot and event.sequence != self.sequence:
                self._lose(event.sequence)
            return _NOTHING
        if self.needs_snapshot:
            self._buffer(event.sequence, event.body)
            return _NOTHING
        if event.sequence == self.sequence + 1:
            self.sequence += 1
            return SequenceStep((event.body,))
        if event.sequence == self.sequence:
            self.counts.duplicates += 1
            return _NOTHING
        self._lose(event.sequence)
        self._buffer(event.sequence, event.body)
        return _NOTHING

    def take_snapshot(self, snapshot: WholeSnapshot) -> SequenceStep:
        """The answer to what `needs_snapshot` asked for, also if it comes uncalled."""
        if snapshot.incarnation < self.incarnation:
            self.counts.outdated += 1
            self._outdated_answers += 1
            if self._outdated_answers < OUTDATED_ANSWERS_MAX or not self.needs_snapshot:
                return _NOTHING
        self._outdated_answers = 0
        if snapshot.incarnation != self.incarnation:
            self._begin(snapshot.incarnation)
        elif not self.needs_snapshot and snapshot.sequence <= self.sequence:
            return _NOTHING
        self.sequence = snapshot.sequence
        buffered = self._take_buffered()
        events: list[bytes] = []
        while (body := buffered.pop(self.sequence + 1, None)) is not None:
            self.sequence += 1
            events.append(body)
        left = {number: body for number, body in buffered.items() if number > self.sequence}
        self.needs_snapshot = bool(left)
        if left:
            # A number is missing among what came after the snapshot.
            self.counts.gaps += 1
            for number, body in left.items():
                self._buffer(number, body)
        return SequenceStep(tuple(events), snapshot=snapshot.bodies)

    def lose(self) -> None:
        """What was applied last could not be understood: only a snapshot helps."""
        self.needs_snapshot = True

    def close(self) -> None:
        """The publisher is followed no more: give back what waits in the buffer."""
        self._take_buffered()

    def _begin(self, incarnation: int) -> None:
        self.counts.restarts += self.incarnation >= 0
        self.incarnation = incarnation
        self.sequence = 0
        self._outdated_events = 0
        self._take_buffered()

    def _lose(self, sequence: int) -> None:
        if sequence > self.sequence:
            self.trouble = Trouble.GAP
            self.counts.gaps += 1
        else:
            self.trouble = Trouble.BACKWARDS
            self.counts.backwards += 1
        self.needs_snapshot = True

    def _buffer(self, sequence: int, body: bytes) -> None:
        counts = self.counts
        is_full = len(self._buffered) >= self._buffered_max
        if is_full or counts.buffered_bytes + len(body) > BUFFERED_BYTES_MAX:
            # Nothing is lost by this but time: what is dropped shows as a gap once more.
            counts.overflowed += 1
            self._take_buffered()
            if counts.buffered_bytes + len(body) > BUFFERED_BYTES_MAX:
                return
        counts.buffered_bytes += len(body) - len(self._buffered.get(sequence, b""))
        self._buffered[sequence] = body

    def _take_buffered(self) -> dict[int, bytes]:
        buffered, self._buffered = self._buffered, {}
        self.counts.buffered_bytes -= sum(map(len, buffered.values()))
        return buffered
