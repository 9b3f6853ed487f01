"""I10 and I13: what was told by events, against what is true where it was told.

What a watch tells is held against the store (I13), what routers heard over the broker against the
workers (I10).

A router's index of KV blocks, and its table of loads, are fed by events that may be lost. After
quiescence they must be right all the same: who missed one has asked for a snapshot by then. The
driver asks `stale_reports` again and again until it is empty or the time for it is up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trinamo.runtime.protocol.kv.events import BlockSet
from trinamo.runtime.protocol.kv.names import block_keys

from ..cluster.services import BROKER

if TYPE_CHECKING:
    from trinamo.runtime.caller.router import Router

    from ..cluster.outcome import Outcome
    from ..cluster.roles import Process


def check(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """Revisions that go back within one watch, and watches that do not begin with a snapshot."""
    seen: dict[tuple[str, str], int] = {}
    restored = any(fault.do == "restore" for fault in outcome.scenario.faults)
    for row in outcome.told:
        if row.kind != "watch.event":
            continue
        watch, revision = (row.host, row.field("watch")), row.field("revision")
        if watch not in seen and row.field("what") != "Snapshot":
            yield "I13", f"watch {watch[1]} began with a {row.field('what')}"
        if restored and row.field("what") == "Resync":
            seen[watch] = 0
        if revision < seen.get(watch, 0):
            yield "I13", f"watch {watch[1]} went back from revision {seen[watch]} to {revision}"
        seen[watch] = max(revision, seen.get(watch, 0))


def stale_views(outcome: Outcome) -> Iterator[str]:
    """Readers that the store can reach, and that do not know what it holds; none at quiescence."""
    cluster = outcome.cluster
    for name, process in cluster.processes.items():
        control = process.transports.control
        if control is None or not cluster.is_up(name) or not cluster.services.is_reachable(name):
            continue
        for view in control.views:
            held = cluster.store.values(view.prefix)
            if view.known != held:
                missing = sorted(set(held) - set(view.known))
                stale = sorted(set(view.known) - set(held))
                yield (
                    f"watch {view.name} of {view.prefix}: does not know {missing}, believes in"
                    f" {stale} (or older values)"
                )
        yield from _stale_routers(outcome, name)


def _stale_routers(outcome: Outcome, name: str) -> Iterator[str]:
    """A router's live set is what the store holds, too: nothing was lost after the watch."""
    runtime = outcome.cluster.processes[name].runtime
    for client in () if runtime is None else runtime.clients:
        router = client.router
        held = set(outcome.cluster.store.values(router.endpoint.key_prefix))
        known = {instance.key for instance in router.instances}
        if known != held:
            yield f"the router of {name} knows {sorted(known)}; the store holds {sorted(held)}"


def stale_reports(outcome: Outcome) -> Iterator[str]:
    """What some router believes of a living worker and is not so; none at quiescence."""
    workers = dict(_workers(outcome))
    for name, router in _routers(outcome):
        for instance in router.instances:
            process = workers.get(instance.id)
            if process is None:
                continue
            where = f"the router of {name} on {process.name}"
            yield from (f"{where}: {text}" for text in _wrong_blocks(router, instance.id, process))
            yield from (f"{where}: {text}" for text in _wrong_load(router, instance.id, process))


def missed(outcome: Outcome) -> Iterator[tuple[str, int, int]]:
    """By host: how many gaps its routers met, and how many snapshots they took."""
    for name, router in _routers(outcome):
        gaps = snapshots = 0
        if router.kv is not None and router.kv.index is not None:
            statistics = router.kv.index.statistics()
            gaps, snapshots = statistics["gaps"], statistics["snapshots"]
        if router.reports is not None:
            follower = router.reports.loads.follower
            gaps, snapshots = gaps + follower.counts.gaps, snapshots + follower.snapshot_count
        yield name, gaps, snapshots


def _workers(outcome: Outcome) -> Iterator[tuple[str, Process]]:
    cluster = outcome.cluster
    for name in cluster.workers:
        process = cluster.processes[name]
        runtime = process.runtime
        if runtime is not None and runtime.instance_id and _is_heard(outcome, name):
            yield runtime.instance_id, process


def _routers(outcome: Outcome) -> Iterator[tuple[str, Router]]:
    for name, process in outcome.cluster.processes.items():
        if process.runtime is not None and _is_heard(outcome, name):
            for client in process.runtime.clients:
                yield name, client.router


def _is_heard(outcome: Outcome, name: str) -> bool:
    """Whether the process lives, is to stay, and the broker and it reach each other."""
    cluster = outcome.cluster
    is_joined = cluster.is_up(name) and cluster.services.is_reachable(name, BROKER)
    return is_joined and not cluster.processes[name].stop.is_requested


def _wrong_blocks(router: Router, instance_id: str, process: Process) -> Iterator[str]:
    engine: Any = process.engine
    if router.kv is None or router.kv.index is None or engine is None:
        return
    blocks = BlockSet()
    for event in engine.kv.pool.stored():
        blocks.apply(event)
    held = set(block_keys(tuple(blocks.hashes)))
    known = router.kv.index.blocks(instance_id)
    if known - held:
        yield f"it believes in {len(known - held)} blocks that are not there"
    if held - known:
        yield f"it does not know {len(held - known)} blocks that are there"


def _wrong_load(router: Router, instance_id: str, process: Process) -> Iterator[str]:
    runtime, engine = process.runtime, process.engine
    if router.reports is None or runtime is None or runtime.worker is None:
        return
    report = router.report(instance_id)
    active = runtime.worker.admitted_count
    kv = None if engine is None else engine.kv
    used = 0 if kv is None else kv.pool.taken_count
    if report is None or (report.active, report.blocks_used) != (active, used):
        yield f"its load is {active} requests and {used} blocks, known is {report}"
