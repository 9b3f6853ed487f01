"""The worker's end of KV events: what its engine's cache does, told to whoever keeps an index.

An engine calls `tell` between its steps and never waits for the event plane; one task numbers and
sends what was told, several steps in one message if the plane is slower than the engine. What it
is told is kept in a set, so that every snapshot is exactly what the events up to its number add
up to, whatever the engine does meanwhile. The other end is `index.py`. What the processes of one namespace
name their blocks by, and nobody else can, is agreed on here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import trio

from ..env import Env
from ..errors import ControlPlaneError
from ..events.source import EventSource, topic_of
from ..metrics.tallies import Registry
from ..nurseries import open_nursery
from ..planes import ControlPlane, EventPlane
from ..planes.retries import Retries
from ..protocol.discovery.instances import EndpointName
from ..protocol.kv.events import BlockSet, KvEvent, encode_batch, next_batch
from ..protocol.kv.names import HASH_BYTES, BlockNames

KV_TOPIC: Final = "kv2"
"""Named after its format: who speaks an older one neither hears this nor is heard."""
_OUTBOX_BLOCKS_MAX: Final = 65_536


class KvEventSource:
    """Publishes the KV events of one instance of one endpoint.

    At most `outbox_blocks_max` blocks wait to be sent; what is beyond goes with all that waits, as
    a gap in the numbers, which costs every follower one snapshot. A broker that is away changes
    nothing: the numbers go on, and the followers see what they missed when it is back.
    """

    def __init__(
        self,
        events: EventPlane,
        endpoint: EndpointName,
        *,
        instance_id: str,
        incarnation: int,
        outbox_blocks_max: int = _OUTBOX_BLOCKS_MAX,
        beat_s: float = 1.0,
    ) -> None:
        self._held = BlockSet()
        self._waiting: deque[KvEvent] = deque()
        self._waiting_blocks = 0
        self._outbox_blocks_max = outbox_blocks_max
        self._told = 0
        self._messages = 0
        self._wakeup = trio.Event()
        self._source = EventSource(
            events,
            topic_of(KV_TOPIC, endpoint),
            publisher=instance_id,
            incarnation=incarnation,
            snapshot=self._held.encode_part,
            beat_s=beat_s,
        )

    def tell(self, events: Sequence[KvEvent]) -> None:
        """The cache has done this, in this order. Never waits and never fails."""
        self._told += len(events)
        self._waiting.extend(events)
        self._waiting_blocks += sum(len(each.block_hashes) for each in events)
        if max(self._waiting_blocks, len(self._waiting)) > self._outbox_blocks_max:
            for event in self._waiting:
                self._held.apply(event)
            self._waiting.clear()
            self._waiting_blocks = 0
            self._source.skip()
        self._wakeup.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Publish, beat and answer for the snapshot until cancelled; what waits then is lost."""
        async with open_nursery() as nursery:
            await nursery.start(self._source.run)
            task_status.started()
            while True:
                await self._wakeup.wait()
                self._wakeup = trio.Event()
                while self._waiting:
                    batch = next_batch(self._waiting)
                    for event in batch:
                        self._held.apply(event)
                        self._waiting_blocks -= len(event.block_hashes)
                    self._messages += 1
                    # Takes its number before it waits for anything, so that set and number change together.
                    await self._source.publish(encode_batch(batch))

    def statistics(self) -> dict[str, int]:
        """Gauges and counters as of now, by the names under which `/metrics` shows them."""
        return {
            "blocks": len(self._held),
            "waiting_blocks": self._waiting_blocks,
            "told": self._told,
            "messages": self._messages,
            "dropped": self._source.dropped,
            "snapshots": self._source.snapshot_count,
            "malformed": self._source.malformed,
        }


def show_source(metrics: Registry, endpoint: str, source: KvEventSource) -> None:
    """Show what is told about the blocks of the engine that serves `endpoint`."""
    metrics.readings(
        "kv_events_",
        ("endpoint",),
        lambda shown: [((name,), each.statistics()) for name, each in shown.items()],
        gauges={
            "blocks": "Full blocks that were told as held",
            "waiting_blocks": "Blocks in events that wait to be sent",
        },
        counters={
            "told": "Events that the engine told",
            "messages": "Messages that the events went out in",
            "dropped": "Messages not sent: a gap to every follower",
            "snapshots": "Snapshots, or parts of one, that were sent",
            "malformed": "Requests for a snapshot that were none",
        },
    ).shown[endpoint] = source


KV_NAMES_PREFIX: Final = "kv_names/"
_log = logging.getLogger("trinamo.kv")


async def share_names(control: ControlPlane, env: Env, secret: bytes, namespace: str) -> BlockNames:
    """The names of `namespace`: by the cluster's secret, or else by a salt in the control plane.

    Whoever comes first draws the salt. A store that is away is waited for; where it refuses, the
    names are this process's own, which routers see and log.
    """
    shared = secret

    async def agree(_: Callable[[], None]) -> None:
        nonlocal shared
        key = KV_NAMES_PREFIX + namespace
        drawn = env.rng.getrandbits(8 * HASH_BYTES).to_bytes(HASH_BYTES, "big")
        try:
            while (entry := await control.get(key)) is None:
                await control.compare_and_put(key, drawn, mod_revision=0)
            shared = entry.value
        except ControlPlaneError:
            shared = drawn

    if not secret:
        await Retries(_log, f"the KV blocks of {namespace} have no names").run(agree)
    return BlockNames(shared + namespace.encode())
