"""Which instance holds which KV blocks: the router's end of KV events.

`KvIndex` follows the events of every instance of one endpoint that discovery knows. What it says of
an instance is what that one held a moment ago, or a part of it, or nothing, but never what was true
before an event that was missed: from a gap on an instance has no blocks here until its snapshot has
come. The worker's end is `events.py`; what is in an event is `protocol/kv/events.py`, the map itself
`protocol/kv/holders.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import trio

from ..events.follower import EventFollower
from ..events.source import topic_of
from ..nurseries import open_nursery
from ..planes import EventPlane
from ..protocol.discovery.instances import EndpointName
from ..protocol.kv.events import Removed, Stored, decode_keys, decode_part
from ..protocol.kv.holders import BlockHolders, Reach
from .events import KV_TOPIC

_PENDING_MAX: Final = 8192
"""Messages that wait to be read; the largest have 16 KiB."""


class KvIndex:
    """The blocks of every instance of one endpoint.

    Follows at most `instances_max` instances and keeps at most `instance_blocks_max` blocks of
    each and `blocks_max` of all, at most 100 bytes a block; what is beyond is counted and not kept.
    """

    def __init__(
        self,
        events: EventPlane,
        endpoint: EndpointName,
        *,
        instances_max: int = 1024,
        instance_blocks_max: int = 1 << 18,
        blocks_max: int = 1 << 22,
    ) -> None:
        self._instance_blocks_max = instance_blocks_max
        self._blocks_max = blocks_max
        self._joined: dict[str, None] = {}
        self._map = BlockHolders()
        self._bits: dict[str, int] = {}
        """Of each instance that has said something; without one it has no blocks here."""
        self._instances: dict[int, str] = {}
        """By bit."""
        self._blocks = 0
        self._events = 0
        self._refused = 0
        self._dirt = trio.Event()
        self._follower = EventFollower(
            events,
            topic_of(KV_TOPIC, endpoint),
            on_event=self._on_event,
            on_snapshot=self._on_snapshot,
            on_lost=self._empty,
            follows=self._joined.__contains__,
            publishers_max=instances_max,
            pending_max=_PENDING_MAX,
        )

    # --- discovery in ---

    def join(self, instance_id: str) -> None:
        """The instance is in the live set: follow it. Events before that are not taken."""
        self._joined[instance_id] = None

    def leave(self, instance_id: str) -> None:
        """The instance has left the live set: forget it."""
        self._joined.pop(instance_id, None)
        self._follower.forget(instance_id)
        self._drop(instance_id)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow until cancelled. While the broker is away, what is known stays known."""
        async with open_nursery() as nursery:
            nursery.start_soon(self._sweep)
            await self._follower.run(task_status=task_status)
            nursery.cancel_scope.cancel()

    async def _sweep(self) -> None:
        """Give the memory of forgotten blocks back, a millisecond's work at a time."""
        while True:
            await self._dirt.wait()
            self._dirt = trio.Event()
            while self._map.is_dirty:
                self._map.sweep()
                await trio.lowlevel.checkpoint()

    # --- events in ---

    def _bit(self, instance_id: str) -> int:
        bit = self._bits.get(instance_id)
        if bit is None:
            bit = self._bits[instance_id] = self._map.join()
            self._instances[bit] = instance_id
        return bit

    def _drop(self, instance_id: str) -> None:
        """What the instance holds is not known any more, nor that it holds anything."""
        bit = self._bits.pop(instance_id, None)
        if bit is None:
            return
        del self._instances[bit]
        self._blocks -= self._map.count(bit)
        self._map.leave(bit)
        if self._map.is_dirty:
            self._dirt.set()

    def _empty(self, instance_id: str) -> None:
        """The instance holds no block, or what it holds is not known."""
        self._drop(instance_id)
        self._bit(instance_id)

    def _on_event(self, instance_id: str, body: bytes) -> None:
        batch = decode_keys(body)
        for kind, keys in batch:
            if kind is Stored:
                self._store(instance_id, keys)
            elif kind is Removed:
                bit = self._bit(instance_id)
                before = self._map.count(bit)
                self._map.remove(bit, keys)
                self._blocks += self._map.count(bit) - before
            else:
                self._empty(instance_id)
        self._events += len(batch)

    def _on_snapshot(self, instance_id: str, bodies: tuple[bytes, ...]) -> None:
        parts = [decode_part(body) for body in bodies]
        self._empty(instance_id)
        for keys in parts:
            self._store(instance_id, keys)

    def _store(self, instance_id: str, keys: Sequence[int]) -> None:
        bit = self._bit(instance_id)
        before = self._map.count(bit)
        blocks_max = min(self._instance_blocks_max, before + self._blocks_max - self._blocks)
        self._refused += self._map.store(bit, keys, blocks_max)
        self._blocks += self._map.count(bit) - before

    # --- questions ---

    def reach(self, keys: Sequence[int]) -> Reach:
        """How far each instance's blocks reach into a sequence.

        `keys` are `block_keys` of the sequence's full blocks from its start, named with the tokens
        per block of the endpoint's engines. Costs a look-up for every two blocks at most.
        """
        return Reach(self._map.depths(keys), self._bits, self._instances)

    def blocks(self, instance_id: str) -> set[int]:
        """The keys of all blocks of an instance, for checks: goes through the whole map."""
        bit = self._bits.get(instance_id)
        return set() if bit is None else self._map.blocks(bit)

    def statistics(self) -> dict[str, int]:
        """Gauges and counters as of now, by the names under which `/metrics` shows them."""
        follower, counts = self._follower, self._follower.counts
        return {
            "instances": len(self._bits),
            "lost": follower.lost_count,
            "blocks": self._blocks,
            "events": self._events,
            "snapshots": follower.snapshot_count,
            "malformed": follower.malformed,
            "unknown": follower.unknown,
            "ignored": follower.ignored,
            "refused_blocks": self._refused,
            "gaps": counts.gaps,
            "backwards": counts.backwards,
            "duplicates": counts.duplicates,
            "outdated": counts.outdated,
            "restarts": counts.restarts,
            "overflowed": counts.overflowed,
        }
