"""Which instance holds which KV blocks: the router's end of KV events.

`KvIndex` follows the events of every instance of one endpoint that discovery knows. What it says of
an instance is what that one held a moment ago, or a part of it, or nothing, but never what was true
before an event that was missed: from a gap on an instance has no blocks here until its snapshot has
come. The worker's end is `events.py`; what is in an event is `protocol/kv/events.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import trio

from ..events.follower import EventFollower
from ..events.subjects import topic_of
from ..planes import EventPlane
from ..protocol.discovery.instances import EndpointName
from ..protocol.kv.blocks import BlockTable
from ..protocol.kv.events import decode_batch
from .events import KV_TOPIC

__all__ = ["KvIndex", "KvIndexStatistics"]

_PENDING_MAX: Final = 8192
"""Messages that wait to be read; the largest have 16 KiB."""


@attrs.frozen
class KvIndexStatistics:
    """Gauges and counters at one moment."""

    instances: int
    """Instances that blocks are known of, or might be."""
    lost: int
    """Instances whose snapshot is awaited."""
    blocks: int
    """Blocks known, over all instances."""
    events: int
    """KV events applied."""
    snapshots: int
    """Snapshots taken."""
    gaps: int
    """Times that a number was missing."""
    backwards: int
    """Times that a number went back."""
    duplicates: int
    outdated: int
    """Events and snapshots of an incarnation before the one known."""
    restarts: int
    """Incarnations that followed another one under the same instance id."""
    malformed: int
    """Messages that made no sense; their publisher was asked for a snapshot, if it is known."""
    unknown: int
    """Events of instances that discovery does not know."""
    ignored: int
    """Events of instances beyond `instances_max`."""
    refused_blocks: int
    """Blocks that were not kept because a bound was reached."""
    overflowed: int
    """Times that too many events waited for a snapshot."""


class KvIndex:
    """The blocks of every instance of one endpoint.

    Follows at most `instances_max` instances and keeps at most `instance_blocks_max` blocks of
    each and `blocks_max` of all, about 120 bytes a block; what is beyond is counted and not kept.
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
        self.endpoint = endpoint
        self._instance_blocks_max = instance_blocks_max
        self._blocks_max = blocks_max
        self._joined: dict[str, None] = {}
        self._tables: dict[str, BlockTable] = {}
        self._blocks = 0
        self._events = 0
        self._refused = 0
        self._follower = EventFollower(
            events,
            topic_of(KV_TOPIC, endpoint),
            on_event=self._on_event,
            on_snapshot=self._on_snapshot,
            on_lost=self._on_lost,
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
        table = self._tables.pop(instance_id, None)
        if table is not None:
            self._blocks -= len(table)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow until cancelled. While the broker is away, what is known stays known."""
        await self._follower.run(task_status=task_status)

    # --- events in ---

    def _table(self, instance_id: str) -> BlockTable:
        """The instance's table, with the room that there is for it now."""
        table = self._tables.get(instance_id)
        if table is None:
            table = self._tables[instance_id] = BlockTable()
        left = self._blocks_max - self._blocks
        table.blocks_max = min(self._instance_blocks_max, len(table) + left)
        return table

    def _on_event(self, instance_id: str, body: bytes) -> None:
        batch = decode_batch(body)
        table = self._table(instance_id)
        before, refused = len(table), table.refused
        for event in batch:
            table.apply(event)
        self._events += len(batch)
        self._settle(table, before, refused)

    def _on_snapshot(self, instance_id: str, bodies: tuple[bytes, ...]) -> None:
        table = self._table(instance_id)
        before, refused = len(table), table.refused
        table.replace(bodies)
        self._settle(table, before, refused)

    def _on_lost(self, instance_id: str) -> None:
        table = self._table(instance_id)
        before = len(table)
        table.clear()
        self._settle(table, before, table.refused)

    def _settle(self, table: BlockTable, before: int, refused: int) -> None:
        self._blocks += len(table) - before
        self._refused += table.refused - refused

    # --- questions ---

    def overlap(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of a sequence each instance holds; those with none are left out.

        `hashes` are the sequence's full blocks from its start, as `block_hashes` names them with
        the tokens per block of the endpoint's engines. Costs one look-up an instance, and one for
        each block found.
        """
        found = {instance_id: table.leading(hashes) for instance_id, table in self._tables.items()}
        return {instance_id: count for instance_id, count in found.items() if count}

    def blocks(self, instance_id: str) -> Mapping[bytes, bytes]:
        """The blocks of an instance, each with its parent (empty for a first one); live."""
        return self._table(instance_id).parents if instance_id in self._tables else {}

    def statistics(self) -> KvIndexStatistics:
        """The counts as of now."""
        follower, counts = self._follower, self._follower.counts
        return KvIndexStatistics(
            instances=len(self._tables),
            lost=follower.lost_count,
            blocks=self._blocks,
            events=self._events,
            snapshots=follower.snapshot_count,
            gaps=counts.gaps,
            backwards=counts.backwards,
            duplicates=counts.duplicates,
            outdated=counts.outdated,
            restarts=counts.restarts,
            malformed=follower.malformed,
            unknown=follower.unknown,
            ignored=follower.ignored,
            refused_blocks=self._refused,
            overflowed=counts.overflowed,
        )
