"""The server's end of a Watch stream: where each of its watches is in the store's history. Sans-IO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from trinamo.runtime.errors import CompactedError
from trinamo.runtime.planes import Put
from trinamo.transports.etcd import wire_pb2 as wire
from trinamo.transports.memory.store import Change, MemoryStore

from ...core.choices import Choices
from .methods import header_of, key_value_of, prefix_of

FRAGMENT_ONE_IN = 4
"""How often the events of one reply come in two; etcd does so above a size that no run reaches."""


@attrs.define
class _Watch:
    """One watch: the prefix, or the one key if `is_key`, and the next revision to send."""

    key: str
    is_key: bool
    next_revision: int

    def wants(self, change: Change) -> bool:
        key = change.entry.key if isinstance(change, Put) else change.key
        return key == self.key or not self.is_key


class WatchStream:
    """The watches of one stream, in the order they came."""

    def __init__(self, choices: Choices) -> None:
        self.is_progress_due = False
        """Set to have every watch told how far it is."""
        self._choices = choices
        self._watches: dict[int, _Watch] = {}

    def take(self, request: Any, store: MemoryStore, store_id: int) -> wire.WatchResponse:
        """What the client said, and the answer, which comes before any event."""
        if request.HasField("cancel_request"):
            watch_id = request.cancel_request.watch_id
            self._watches.pop(watch_id, None)
            return _reply(store, store_id, watch_id, canceled=True)
        wanted = request.create_request
        is_key = not wanted.range_end
        key = wanted.key.decode() if is_key else prefix_of(wanted.range_end)
        start = wanted.start_revision or store.revision + 1
        self._watches[wanted.watch_id] = _Watch(key, is_key, start)
        return _reply(store, store_id, wanted.watch_id, created=True)

    def pending(
        self, store: MemoryStore, store_id: int, now: float
    ) -> Iterator[wire.WatchResponse]:
        """What is to be sent now, one message at a time: the store may go on between two."""
        for watch_id, watch in list(self._watches.items()):
            for fields in self._pending_of(watch_id, watch, store, now):
                yield _reply(store, store_id, watch_id, **fields)
        self.is_progress_due = False

    def _pending_of(
        self, watch_id: int, watch: _Watch, store: MemoryStore, now: float
    ) -> Iterator[dict[str, Any]]:
        while self._watches.get(watch_id) is watch:
            asked = watch.next_revision
            try:
                changes, watch.next_revision = store.changes(
                    watch.key, start_revision=asked, now=now
                )
            except CompactedError as error:
                del self._watches[watch_id]
                yield {"canceled": True, "compact_revision": error.compact_revision}
                return
            yield from self._told([change for change in changes if watch.wants(change)])
            if watch.next_revision == asked:
                if self.is_progress_due:
                    # Nothing came between the look at the history and this.
                    yield {}
                return

    def _told(self, changes: list[Change]) -> Iterator[dict[str, Any]]:
        events = list(map(_event_of, changes))
        if len(events) > 1 and self._choices.chance(FRAGMENT_ONE_IN, "fragment"):
            cut = 1 + self._choices.below(len(events) - 1, "fragment size")
            yield {"events": events[:cut], "fragment": True}
            events = events[cut:]
        if events:
            yield {"events": events}


def _reply(store: MemoryStore, store_id: int, watch_id: int, **fields: Any) -> wire.WatchResponse:
    return wire.WatchResponse(header=header_of(store, store_id), watch_id=watch_id, **fields)


def _event_of(change: Change) -> wire.Event:
    if isinstance(change, Put):
        return wire.Event(type=wire.Event.PUT, kv=key_value_of(change.entry))
    return wire.Event(
        type=wire.Event.DELETE,
        kv=wire.KeyValue(key=change.key.encode(), mod_revision=change.revision),
    )
