"""A snapshot of what a publisher's events add up to: asked for, answered, and put together.

Sans-IO. One request has one answer. If the snapshot is larger than a message the answer says in how
many parts to ask for it, and nothing is kept for that at the publisher: each part is what is true
when it is asked for. The events after the first part are applied to all of them once more, so a
state that is told in parts must bear that (`protocol/kv/blocks.py` says how). The rules for when to
ask are in `sequence.py`.
"""

from __future__ import annotations

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


_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(SnapshotRequest)
_snapshot_decoder = msgspec.msgpack.Decoder(SequencedSnapshot)


def encode_request(request: SnapshotRequest) -> bytes:
    return _encoder.encode(request)


def encode_snapshot(snapshot: SequencedSnapshot) -> bytes:
    return _encoder.encode(snapshot)


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
        """What to ask for next."""
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
            self._split(answer.parts)
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

    def _split(self, parts: int) -> None:
        if parts <= self._parts:
            raise RemoteProtocolError(f"{parts} parts instead of {self._parts}")
        if parts > PARTS_MAX:
            raise OverloadedError(
                f"the snapshot of {self._publisher} needs {parts} parts",
                bound="PARTS_MAX",
                value=PARTS_MAX,
            )
        self._parts = parts
        self._taken.clear()
