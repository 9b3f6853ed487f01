"""The router's index is what the workers hold: equal once events are quiet, never wrong before."""

from __future__ import annotations

from collections import deque
from functools import partial

import trio
import trio.testing
from hypothesis import given, strategies as st

from tests.runtime.kv.caching import CachedSequences
from trinamo.runtime.kv.events import KvEventSource
from trinamo.runtime.kv.index import KvIndex
from trinamo.runtime.planes import Message
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.kv.events import (
    BlockSet,
    Cleared,
    KvEvent,
    Removed,
    Stored,
    decode_keys,
    decode_part,
    encode_batch,
    next_batch,
)
from trinamo.runtime.protocol.kv.names import HASH_BYTES, block_keys
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane

ENDPOINT = EndpointName("ns", "engine", "generate")
BLOCK_TOKENS, BLOCK_COUNT, SLOTS = 2, 5, 3
INSTANCES = ("a", "b")

# Few different tokens, so that prefixes meet; a cache that is soon full, so that blocks are evicted.
TOKENS = st.lists(st.integers(0, 2), min_size=2, max_size=9)
WORKER = st.integers(0, len(INSTANCES) - 1)
FATES = st.sampled_from(["arrives", "lost", "waits"])
"""Of the message about what a cache did: `waits` lets the next thing happen before it is sent."""
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), WORKER, FATES, st.tuples(st.integers(0, SLOTS - 1), TOKENS)),
        st.tuples(st.just("run"), WORKER, FATES, st.tuples(st.integers(0, SLOTS - 1), TOKENS)),
        st.tuples(st.just("release"), WORKER, FATES, st.integers(0, SLOTS - 1)),
        st.tuples(st.just("clear"), WORKER, FATES, st.none()),
        st.tuples(st.just("repeat"), WORKER, st.none(), st.integers(0, 7)),
        st.tuples(st.just("lose"), WORKER, st.none(), st.integers(1, 3)),
        st.tuples(st.just("stop"), WORKER, st.none(), st.none()),
        st.tuples(st.just("start"), WORKER, st.none(), st.none()),
        st.tuples(st.just("restart"), WORKER, st.none(), st.none()),
        st.tuples(st.just("forget"), WORKER, st.none(), st.none()),
        st.tuples(st.just("wait"), WORKER, st.none(), st.sampled_from([0.05, 3.0])),
    ),
    min_size=6,
    max_size=30,
)
Step = tuple[str, int, str | None, object]
SOON_S = 0.01


class Worker:
    """A cache that tells what it does, and all that it was at some moment."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        self.broker, self.name, self.incarnation = broker, name, 0
        self.history: list[set[int]] = [set()]
        self.scope = trio.CancelScope()
        self.restart()

    def restart(self) -> None:
        self.incarnation += 1
        self.cache = CachedSequences(BLOCK_COUNT, BLOCK_TOKENS)
        self.source = KvEventSource(
            # So little waits for a broker that is away that an outage drops messages.
            MemoryEventPlane(self.broker, buffered_max=2),
            ENDPOINT,
            instance_id=self.name,
            incarnation=self.incarnation,
            outbox_blocks_max=3,
        )

    @property
    def held(self) -> set[int]:
        blocks = BlockSet()
        for event in self.cache.pool.stored():
            blocks.apply(event)
        return set(block_keys(tuple(blocks.hashes)))

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        with trio.CancelScope() as self.scope:
            await self.source.run(task_status=task_status)

    def tell(self) -> None:
        self.source.tell(self.cache.take_events())

    def clear(self) -> None:
        """All blocks go at once, as when an engine empties its cache."""
        self.cache.pool.forget_prefixes()


class Run:
    def __init__(self, *, message_bytes_max: int, delay_s: float = 0.0) -> None:
        self.broker = MemoryBroker(message_bytes_max=message_bytes_max)
        self.broker.delay_s = delay_s
        self.workers = [Worker(self.broker, name) for name in INSTANCES]
        self.index = KvIndex(MemoryEventPlane(self.broker), ENDPOINT)
        self.heard: deque[Message] = deque(maxlen=8)
        self.plane = MemoryEventPlane(self.broker)

    async def play(self, steps: list[Step], *, is_whole: bool) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.index.run)
            await nursery.start(self.listen)
            for worker in self.workers:
                self.index.join(worker.name)
                await nursery.start(worker.serve)
            for kind, number, fate, value in steps:
                worker = self.workers[number]
                if fate == "lost":
                    await trio.sleep(SOON_S)
                    self.broker.drop_next(1)
                await self.step(kind, value, worker, nursery)
                if fate is not None:
                    worker.tell()
                worker.history.append(worker.held)
                if fate != "waits":
                    await trio.sleep(SOON_S)
                if is_whole:
                    self.check_never_wrong()
            self.broker.start()
            self.broker.drop_next(0)
            await trio.sleep(30)
            for worker in self.workers:
                assert self.index.blocks(worker.name) == worker.held
            assert self.index.statistics()["blocks"] == sum(len(w.held) for w in self.workers)
            assert self.index.statistics()["lost"] == 0
            nursery.cancel_scope.cancel()

    async def step(self, kind: str, value: object, worker: Worker, nursery: trio.Nursery) -> None:
        if kind == "run":
            assert isinstance(value, tuple)
            slot, tokens = value
            worker.cache.run(slot, tokens)
        elif kind == "release":
            assert isinstance(value, int)
            worker.cache.release(value)
        elif kind == "clear":
            worker.clear()
        elif kind == "lose":
            assert isinstance(value, int)
            self.broker.drop_next(value)
        elif kind == "repeat":
            assert isinstance(value, int)
            # An old message once more: late, twice, or of a life before.
            if value < len(self.heard):
                message = self.heard[value]
                await self.plane.publish(message.subject, message.payload)
        elif kind == "stop":
            self.broker.stop()
        elif kind == "start":
            self.broker.start()
        elif kind == "restart":
            worker.scope.cancel()
            worker.restart()
            await nursery.start(worker.serve)
        elif kind == "forget":
            self.index.leave(worker.name)
            self.index.join(worker.name)
        elif kind == "wait":
            assert isinstance(value, float)
            await trio.sleep(value)

    async def listen(self, *, task_status: trio.TaskStatus[None]) -> None:
        async with self.plane.subscribe("trinamo.kv2.ns.engine.generate.event.*") as messages:
            task_status.started()
            async for message in messages:
                self.heard.append(message)

    def check_never_wrong(self) -> None:
        """An index may be behind by some steps, but shows only what was once true as a whole."""
        for worker in self.workers:
            assert self.index.blocks(worker.name) in worker.history


@given(STEPS)
def test_whatever_is_lost_repeated_or_restarted_the_index_gets_there(
    steps: list[Step],
) -> None:
    """I10: after event quiescence the index equals the workers' blocks.

    And before, it shows for each worker nothing, or exactly what that one held at some moment.
    """
    run = Run(message_bytes_max=1_048_576)
    trio.run(
        partial(run.play, steps, is_whole=True),
        clock=trio.testing.MockClock(autojump_threshold=0),
    )


@given(STEPS)
def test_a_snapshot_in_parts_comes_to_the_same(steps: list[Step]) -> None:
    """The same where a message holds four blocks, and blocks change between the parts.

    Not fewer: a part is what hashes fall to, and too many of two could need `PARTS_MAX` parts.
    """
    run = Run(message_bytes_max=122, delay_s=SOON_S)
    trio.run(
        partial(run.play, steps, is_whole=False),
        clock=trio.testing.MockClock(autojump_threshold=0),
    )


HASHES = st.lists(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES), min_size=1, max_size=700)
EVENTS = st.lists(
    st.one_of(
        st.builds(Stored, HASHES.map(tuple)),
        st.builds(Removed, HASHES.map(tuple)),
        st.builds(Cleared),
    ),
    max_size=8,
)


@given(EVENTS)
def test_batches_keep_their_bounds_and_add_up_to_what_was_told(events: list[KvEvent]) -> None:
    """However long the events are: every batch decodes to itself, and the tables are equal."""
    whole, cut, waiting = BlockSet(), BlockSet(), deque(events)
    for event in events:
        whole.apply(event)
    while waiting:
        batch = next_batch(waiting)
        told = [block_keys(event.block_hashes) for event in batch]
        assert decode_keys(encode_batch(batch)) == list(zip(map(type, batch), told, strict=True))
        for event in batch:
            cut.apply(event)
    assert cut.hashes == whole.hashes


@given(EVENTS, st.integers(1, 7))
def test_all_parts_together_are_the_blocks(events: list[KvEvent], parts: int) -> None:
    """Every block is in exactly one part."""
    blocks = BlockSet()
    for event in events:
        blocks.apply(event)
    found = [each for part in range(parts) for each in decode_part(blocks.encode_part(part, parts))]
    assert len(found) == len(blocks)
    assert set(found) == set(block_keys(tuple(blocks.hashes)))
