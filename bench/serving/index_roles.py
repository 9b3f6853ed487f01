"""One index of blocks in a process of its own, so that its memory is its own: figures as JSON.

The same blocks and questions for both: `ours` is trinamo's map, `radix` Dynamo's `RadixTree`, which
lives in the environment of the peers. Nothing else is imported before the memory is read.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

EVENT_BLOCKS = 64
BLOCK_TOKENS = 16
WORKERS = 16
PROMPTS = {"1k": 64, "8k": 512, "32k": 2048}
"""Tokens of a prompt, and its blocks of 16 tokens."""
ASKED = 300


def rss() -> int:
    """Bytes of this process that are in memory, what the allocator only keeps for later left out."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text("ascii")
    line = next(each for each in status.splitlines() if each.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def chains(blocks: int) -> list[list[int]]:
    """Sequences that share nothing, each a worker's event."""
    dice = random.Random(7)
    return [
        [dice.getrandbits(60) for _ in range(EVENT_BLOCKS)] for _ in range(blocks // EVENT_BLOCKS)
    ]


def prompts() -> dict[str, list[int]]:
    dice = random.Random(8)
    return {name: [dice.getrandbits(60) for _ in range(count)] for name, count in PROMPTS.items()}


def held(prompt: list[int], worker: int) -> list[int]:
    """What a worker holds of a prompt: each reaches differently far, the last to its end."""
    return prompt[: len(prompt) * (worker + 1) // WORKERS]


def median_us(ask: Callable[[], object]) -> float:
    times = []
    for _ in range(ASKED):
        begun = time.perf_counter()
        ask()
        times.append(time.perf_counter() - begun)
    return sorted(times)[ASKED // 2] * 1e6


def timed(step: Callable[[Any], None], each: Sequence[Any], count: int) -> float:
    """Microseconds of processor time for one of `count`."""
    begun = time.process_time()
    for one in each:
        step(one)
    return (time.process_time() - begun) / count * 1e6


def named_us() -> float:
    """A block of a long prompt, as a frontend names it for its index."""
    from trinamo.runtime.protocol.kv.names import BlockNames, block_keys

    names, count = BlockNames(b"a secret"), PROMPTS["32k"]
    token_ids, root = list(range(BLOCK_TOKENS * count)), names.root("a tenant")
    return median_us(lambda: block_keys(names.of_tokens(token_ids, BLOCK_TOKENS, root))) / count


def ours(blocks: int) -> dict[str, float]:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from trinamo.runtime.protocol.kv.events import Stored, decode_keys, encode_batch
    from trinamo.runtime.protocol.kv.holders import BlockHolders

    def body(chain: list[int]) -> bytes:
        return encode_batch([Stored(tuple(key.to_bytes(16, "big") for key in chain))])

    index = BlockHolders()
    bits = [index.join() for _ in range(WORKERS)]
    # As they come, and made just before they are read: what waits to be read is not the index.
    numbered = list(enumerate(map(body, chains(blocks))))
    before = rss()

    def insert(event: tuple[int, bytes]) -> None:
        number, payload = event
        ((_, keys),) = decode_keys(payload)
        index.store(bits[number % WORKERS], keys, blocks)

    found = {"insert_us": timed(insert, numbered, blocks)}
    found["bytes"] = (rss() - before) / blocks
    for name, prompt in prompts().items():
        for number, bit in enumerate(bits):
            index.store(bit, held(prompt, number), 2 * blocks)
        assert len(index.depths(prompt)) == WORKERS
        found[f"find_{name}_us"] = median_us(lambda prompt=prompt: index.depths(prompt))
    # A cache that is full: for each chain that comes the oldest goes.
    dice = random.Random(9)
    begun = time.process_time()
    for number, payload in numbered:
        ((_, gone),) = decode_keys(payload)
        index.remove(bits[number % WORKERS], gone)
        index.store(bits[number % WORKERS], [dice.getrandbits(60) for _ in gone], 2 * blocks)
    found["replace_us"] = (time.process_time() - begun) / blocks * 1e6
    found["bytes_full"] = (rss() - before) / blocks
    for bit in bits:
        index.leave(bit)
    pauses = []
    while index.is_dirty:
        begun = time.thread_time()
        index.sweep()
        pauses.append(time.thread_time() - begun)
    found["sweep_ms"] = max(pauses) * 1e3
    assert len(index) == 0
    found["bytes_left"] = (rss() - before) / blocks
    found["name_us"] = named_us()
    return found


def radix(blocks: int) -> dict[str, float]:
    def body(number: int, chain: list[int]) -> bytes:
        told = [{"block_hash": key, "tokens_hash": key} for key in chain]
        stored = {"parent_hash": None, "blocks": told}
        return json.dumps({"event_id": number, "data": {"stored": stored}, "dp_rank": 0}).encode()

    tree: Any = importlib.import_module("dynamo._core").RadixTree()
    events = [(number, body(number, chain)) for number, chain in enumerate(chains(blocks))]
    before = rss()
    insert_us = timed(lambda event: tree.apply_event(event[0] % WORKERS, event[1]), events, blocks)
    found = {"insert_us": insert_us, "bytes": (rss() - before) / blocks}
    for name, prompt in prompts().items():
        for worker in range(WORKERS):
            tree.apply_event(worker, body(0, held(prompt, worker)))
        assert len(tree.find_matches(prompt).scores) == WORKERS
        found[f"find_{name}_us"] = median_us(lambda prompt=prompt: tree.find_matches(prompt))
    for worker in range(WORKERS):
        begun = time.thread_time()
        tree.remove_worker(worker)
        pause_ms = (time.thread_time() - begun) * 1e3
        found["sweep_ms"] = max(found.get("sweep_ms", 0.0), pause_ms)
    found["bytes_left"] = (rss() - before) / blocks
    return found


if __name__ == "__main__":
    print(json.dumps({"ours": ours, "radix": radix}[sys.argv[1]](int(sys.argv[2]))))
