"""I9 and I13 of KV memory at quiescence: every block is free again, and peers are known as they are.

What must hold while blocks move is watched when it happens (`cluster/audit.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trinamo.runtime.kv.transfer.engine import EngineTransfers

    from ..cluster.outcome import Outcome
    from ..cluster.roles import Process


def check(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """What was wrong with the life of any block."""
    for text in dict.fromkeys(outcome.cluster.memory.broken):
        yield "I9", text


def lost_blocks(outcome: Outcome) -> Iterator[str]:
    """Blocks of living engines that are not free; none once everybody who could write can be asked."""
    for process in _living(outcome):
        kv = None if process.engine is None else process.engine.kv
        if kv is not None and kv.pool.free_count != kv.pool.block_count:
            counts = f"{kv.pool.used_count} used, {kv.pool.in_flight_count} in flight"
            yield (
                f"{process.name}: of {kv.pool.block_count} blocks {counts},"
                f" {kv.pool.quarantined_count} in quarantine"
            )


def stale_peers(outcome: Outcome) -> Iterator[str]:
    """What a process believes of its peers' memory, and is not what the store holds."""
    cluster = outcome.cluster
    for process in _living(outcome):
        runtime = process.runtime
        if runtime is None or runtime.transfers is None:
            continue
        if cluster.services.is_reachable(process.name):
            yield from _stale(process.name, runtime.transfers, outcome)


def _stale(name: str, transfers: EngineTransfers, outcome: Outcome) -> Iterator[str]:
    store, held = transfers.store, outcome.cluster.store.values("")
    for engine_id, known in store._cached.items():  # noqa: SLF001 -- looks inside
        if held.get(store.key(engine_id), (0, b""))[0] != known.mod_revision:
            yield f"{name} has old metadata of {engine_id}"
    for engine_id, peer in transfers._peers.items():  # noqa: SLF001 -- as above
        _, value = held.get(store.key(engine_id), (0, b""))
        if peer.incarnation.encode() not in value:
            yield f"{name} has not forgotten {peer.incarnation} of {engine_id}"


def _living(outcome: Outcome) -> Iterator[Process]:
    cluster = outcome.cluster
    for name in cluster.servers:
        process = cluster.processes.get(name)
        if process is not None and cluster.is_up(name):
            yield process
