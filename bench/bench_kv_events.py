"""KV events: what it costs a worker to tell its blocks, and a router to keep an index of them.

What the index costs by itself is in `bench_index.py`.

Starts its own NATS on loopback; worker and router are one process with a connection each. CPU is the
process's, so both ends together and without the server.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import trio
import trio.lowlevel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.servers import session_nats  # noqa: E402
from trinamo.runtime.kv.events import KvEventSource  # noqa: E402
from trinamo.runtime.kv.index import KvIndex  # noqa: E402
from trinamo.runtime.protocol.discovery.instances import EndpointName  # noqa: E402
from trinamo.runtime.protocol.kv.events import (  # noqa: E402
    BlockSet,
    KvEvent,
    Removed,
    Stored,
    decode_keys,
    encode_batch,
)
from trinamo.runtime.protocol.kv.holders import BlockHolders  # noqa: E402
from trinamo.runtime.protocol.kv.names import HASH_BYTES, block_keys  # noqa: E402
from trinamo.transports.nats import open_nats  # noqa: E402

BLOCKS = 8
"""Stored by every step, and as many removed: a prefill of 512 tokens into a cache that is full."""
HELD = 16_384


def names(first: int, count: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(HASH_BYTES, "big") for number in range(first, first + count))


def kv_step(number: int) -> list[KvEvent]:
    first = HELD + number * BLOCKS
    return [
        Stored(names(first, BLOCKS)),
        Removed(names(first - HELD, BLOCKS)),
    ]


async def run_events(url: str, told: list[list[KvEvent]]) -> None:
    """One worker's cache, told to one router's index over a real broker."""
    endpoint = EndpointName("bench", "engine", "generate")
    steps = len(told)
    async with (
        open_nats(url) as worker,
        open_nats(url) as router,
        trio.open_nursery() as nursery,
    ):
        index = KvIndex(router, endpoint)
        source = KvEventSource(worker, endpoint, instance_id="a", incarnation=1)
        index.join("a")
        await nursery.start(index.run)
        await nursery.start(source.run)
        source.tell([Stored(names(0, HELD))])
        await until(lambda: len(index.blocks("a")) == HELD)
        done, before = index.statistics()["events"], source.statistics()["messages"]
        started, cpu = time.perf_counter(), time.process_time()
        for number, events in enumerate(told):
            source.tell(events)
            await trio.lowlevel.checkpoint()
            if number % 64 == 0:
                # The worker's own outbox is bounded, and so is what a broker takes.
                await until(lambda: source.statistics()["waiting_blocks"] < 64 * BLOCKS)
        await until(lambda: index.statistics()["events"] == done + 2 * steps)
        elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
        messages = source.statistics()["messages"] - before
        assert index.blocks("a") == set(block_keys(names(steps * BLOCKS, HELD)))
        assert index.statistics()["gaps"] == 0
        row(
            f"KV events: {BLOCKS} blocks stored and {BLOCKS} removed a step",
            f"{steps / elapsed:,.0f} steps/s in {messages / steps:.2f} messages a step;"
            f" {cpu / steps * 1e6:.0f} µs CPU a step, both ends",
        )
        nursery.cancel_scope.cancel()


async def run_plain(url: str, told: list[list[KvEvent]]) -> None:
    """The same bytes as messages that nobody numbers, reads or keeps: what the plane alone costs."""
    bodies = [encode_batch(events) for events in told]
    async with (
        open_nats(url) as worker,
        open_nats(url) as router,
        router.subscribe("bench.plain", pending_max=len(bodies)) as messages,
    ):
        started, cpu = time.perf_counter(), time.process_time()

        async def publish() -> None:
            for number, body in enumerate(bodies):
                await worker.publish("bench.plain", body)
                # As an engine's steps come one by one, so do these.
                await trio.lowlevel.checkpoint()
                if number % 64 == 0:
                    await until(lambda: worker.statistics().waiting_messages < 64)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(publish)
            for _ in bodies:
                await anext(messages)
        elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
        row(
            "the same bytes as plain messages",
            f"{len(bodies) / elapsed:,.0f}/s; {cpu / len(bodies) * 1e6:.0f} µs CPU each, both ends",
        )


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.sleep(0.001)


def run_tables(told: list[list[KvEvent]]) -> None:
    """What each end does by itself, without numbers and broker."""
    ours, theirs, bodies = BlockSet(), BlockHolders(), []
    bit = theirs.join()
    ours.apply(Stored(names(0, HELD)))
    theirs.store(bit, block_keys(names(0, HELD)), HELD)
    cpu = time.process_time()
    for events in told:
        for event in events:
            ours.apply(event)
        bodies.append(encode_batch(events))
    telling = time.process_time() - cpu
    cpu = time.process_time()
    for body in bodies:
        (_, stored), (_, removed) = decode_keys(body)
        theirs.store(bit, stored, HELD + BLOCKS)
        theirs.remove(bit, removed)
    following = time.process_time() - cpu
    assert theirs.blocks(bit) == set(block_keys(tuple(ours.hashes)))
    row(
        "KV events: of that, blocks and codec",
        f"{telling / len(told) * 1e6:.1f} µs a step told, {following / len(told) * 1e6:.1f} followed",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    told = [kv_step(number) for number in range(options.steps)]
    print("| what | result |\n|---|---|")
    with session_nats() as nats:
        for _ in range(options.rounds):
            trio.run(run_plain, nats.url, told)
            trio.run(run_events, nats.url, told)
    run_tables(told)


def row(what: str, result: str) -> None:
    print(f"| {what} | {result} |", flush=True)


if __name__ == "__main__":
    main()
