"""Events that must not be missed over a plane that may lose them: numbers, gaps, snapshots.

Sans-IO. A publisher numbers its events from 1 and puts its incarnation beside the number. Whoever
follows it keeps a `SequencedView`: in order, events are applied; as soon as something is wrong (a
number is missing, or goes back, or a new incarnation began) it needs a snapshot, and what arrives
meanwhile waits in a bounded buffer. `sequenced.py` is the pump.
"""

from __future__ import annotations

from typing import Final

import attrs
import msgspec

from ..errors import RemoteProtocolError

__all__ = [
    "SequenceCounts",
    "SequencedEvent",
    "SequencedSnapshot",
    "SequencedView",
    "Step",
    "decode_event",
    "decode_snapshot",
    "encode_event",
    "encode_snapshot",
]

BUFFERED_MAX: Final = 1024


class SequencedEvent(msgspec.Struct, frozen=True, array_like=True):
    """One event; a heartbeat if there is no body, and then `sequence` is that of the last event."""

    publisher: str
    incarnation: int
    sequence: int
    body: bytes | None


class SequencedSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """All that is true at the publisher after its event `sequence`."""

    publisher: str
    incarnation: int
    sequence: int
    body: bytes


_encoder = msgspec.msgpack.Encoder()
_event_decoder = msgspec.msgpack.Decoder(SequencedEvent)
_snapshot_decoder = msgspec.msgpack.Decoder(SequencedSnapshot)


def encode_event(event: SequencedEvent) -> bytes:
    return _encoder.encode(event)


def encode_snapshot(snapshot: SequencedSnapshot) -> bytes:
    return _encoder.encode(snapshot)


def decode_event(payload: bytes) -> SequencedEvent:
    """Raises `RemoteProtocolError` for what is no event."""
    try:
        event = _event_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"not a sequenced event: {error}") from error
    if event.sequence < (event.body is not None) or event.incarnation < 0:
        raise RemoteProtocolError(f"an event numbered {event.incarnation}/{event.sequence}")
    return event


def decode_snapshot(payload: bytes) -> SequencedSnapshot:
    """Raises `RemoteProtocolError` for what is no snapshot."""
    try:
        snapshot = _snapshot_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"not a snapshot: {error}") from error
    if snapshot.sequence < 0 or snapshot.incarnation < 0:
        raise RemoteProtocolError(f"a snapshot at {snapshot.incarnation}/{snapshot.sequence}")
    return snapshot


@attrs.define
class SequenceCounts:
    """What went wrong so far."""

    gaps: int = 0
    duplicates: int = 0
    backwards: int = 0
    outdated: int = 0
    """Events and snapshots of an incarnation before the one known."""
    overflowed: int = 0
    """Buffers given up because they were full."""


@attrs.frozen
class Step:
    """What to do, in this order: forget all and take `snapshot`, if there is one; apply `events`."""

    events: tuple[bytes, ...] = ()
    snapshot: bytes | None = None


_NOTHING: Final = Step()


class SequencedView:
    """What one follower knows of one publisher. `needs_snapshot` says when to ask for one."""

    def __init__(
        self, counts: SequenceCounts | None = None, *, buffered_max: int = BUFFERED_MAX
    ) -> None:
        self.counts = counts or SequenceCounts()
        self.incarnation = -1
        self.sequence = 0
        self.needs_snapshot = False
        self._buffered: dict[int, bytes] = {}
        self._buffered_max = buffered_max

    def receive(self, event: SequencedEvent) -> Step:
        """Take one event as it arrives."""
        if event.incarnation < self.incarnation:
            self.counts.outdated += 1
            return _NOTHING
        if event.incarnation > self.incarnation:
            # Its first event is all there is to know; a later one means that we missed some.
            self._begin(event.incarnation)
            self.needs_snapshot = True
            if event.sequence == 1 and event.body is not None:
                self.needs_snapshot = False
                self.sequence = 1
                return Step((event.body,), snapshot=b"")
        if event.body is None:
            self._hear(event.sequence)
            return _NOTHING
        if self.needs_snapshot:
            self._buffer(event.sequence, event.body)
            return _NOTHING
        if event.sequence == self.sequence + 1:
            self.sequence += 1
            return Step((event.body,))
        if event.sequence == self.sequence:
            self.counts.duplicates += 1
            return _NOTHING
        self._lose(event.sequence)
        self._buffer(event.sequence, event.body)
        return _NOTHING

    def take_snapshot(self, snapshot: SequencedSnapshot) -> Step:
        """The answer to what `needs_snapshot` asked for, also if it comes uncalled."""
        if snapshot.incarnation < self.incarnation:
            self.counts.outdated += 1
            return _NOTHING
        if snapshot.incarnation > self.incarnation:
            self._begin(snapshot.incarnation)
        elif not self.needs_snapshot and snapshot.sequence <= self.sequence:
            return _NOTHING
        self.sequence = snapshot.sequence
        buffered, self._buffered = self._buffered, {}
        events: list[bytes] = []
        while (body := buffered.pop(self.sequence + 1, None)) is not None:
            self.sequence += 1
            events.append(body)
        left = {number: body for number, body in buffered.items() if number > self.sequence}
        self.needs_snapshot = bool(left)
        if left:
            # A number is missing among what came after the snapshot.
            self.counts.gaps += 1
            self._buffered = left
        return Step(tuple(events), snapshot=snapshot.body)

    def _begin(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.sequence = 0
        self._buffered = {}

    def _hear(self, sequence: int) -> None:
        """A heartbeat: is the last event we know the last there is?"""
        if not self.needs_snapshot and sequence != self.sequence:
            self._lose(sequence)

    def _lose(self, sequence: int) -> None:
        if sequence > self.sequence:
            self.counts.gaps += 1
        else:
            self.counts.backwards += 1
        self.needs_snapshot = True

    def _buffer(self, sequence: int, body: bytes) -> None:
        if len(self._buffered) >= self._buffered_max:
            # Nothing is lost by this but time: what is dropped shows as a gap once more.
            self.counts.overflowed += 1
            self._buffered = {}
        self._buffered[sequence] = body
