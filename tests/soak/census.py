"""What the processes of a soak hold: asked of each at rest, before its faults and after them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from typing import Any, Final

import attrs
import httpx
import trio

from tests.soak.processes import Process, Server, rss_bytes, sockets_of
from trinamo.transports.etcd import open_etcd
from trinamo.transports.servers.binaries import find_etcd

SETTLE_S: Final = 60.0
"""Leases of killed takers, lent blocks and quarantine have bounds below this."""
SOCKETS_MORE: Final = 4

AT_REST: Final = {
    "requests": ("requests_in_flight", "worker_requests_in_flight", "worker_streams"),
    "waiting": ("requests_waiting", "engine_waiting_tokens", "engine_paused_sequences"),
    "sequences": ("engine_sequences",),
    "blocks used": ('engine_kv_blocks{state="used"}',),
    "in flight": ("transfers_in_flight", "remote_prefills_under_way", "prefill_jobs_in_hand"),
    "quarantined": ("quarantined_blocks",),
    "jobs": ('queue_jobs{state="ready"}', 'queue_jobs{state="leased"}', "queue_working"),
}
"""Gauges that are 0 in a process that nobody asks anything, by column; without `trinamo_`."""
COLUMNS: Final = (*AT_REST, "grants")
_SAMPLE: Final = re.compile(r"trinamo_(\w+)(?:\{(.*)\})? (\S+)$")


@attrs.define
class Held:
    """What one process holds."""

    pid: int
    life: int
    sockets: int
    rss: int
    tasks: int | None
    """Of trio; None where nobody tells."""
    gauges: dict[str, float]

    @property
    def is_at_rest(self) -> bool:
        return not any(self.gauges.values())


@attrs.define
class Census:
    """Of all processes, and of etcd."""

    processes: dict[str, Held]
    keys: int
    leases: int

    @property
    def busy(self) -> list[str]:
        return [
            f"{name} holds {', '.join(f'{key} {n:g}' for key, n in held.gauges.items() if n)}"
            for name, held in self.processes.items()
            if not held.is_at_rest
        ]


async def take(
    client: httpx.AsyncClient, members: Iterable[Process], servers: Iterable[Server], etcd: str
) -> Census:
    """Ask everybody now."""
    held = {each.name: await _of_member(client, each) for each in members}
    for each in servers:
        held[each.name] = Held(
            each.pid, 0, sockets_of(each.pid), rss_bytes(each.pid), None, {}
        )  # fmt: skip
    async with open_etcd(etcd) as control:
        found = await control.range("")
    return Census(held, len(found.entries), await _lease_count(etcd))


async def _lease_count(etcd: str) -> int:
    """All leases that etcd has granted, with keys or without."""
    program = find_etcd().with_name("etcdctl")
    command = [str(program), "--endpoints", etcd, "lease", "list"]
    done = await trio.run_process(
        command, capture_stdout=True, env={**os.environ, "ETCDCTL_API": "3"}
    )
    return len(done.stdout.split()[3:])


async def _of_member(client: httpx.AsyncClient, member: Process) -> Held:
    metrics = (await client.get(f"{member.status_url}/metrics")).text
    health = (await client.get(f"{member.status_url}/health")).json()
    tasks = await client.get(f"{member.status_url}/tasks")
    transfers = health.get("transfers") or {}
    gauges = {column: gauge(metrics, names) for column, names in AT_REST.items()}
    gauges["grants"] = transfers.get("leased", 0) + transfers.get("blocks_in_flight", 0)
    return Held(
        member.pid,
        member.lives,
        sockets_of(member.pid),
        rss_bytes(member.pid),
        task_count(tasks.json()) if tasks.status_code == 200 else None,
        gauges,
    )


def gauge(metrics: str, names: Iterable[str]) -> float:
    """The sum of the samples of these names; a name may have one label with its value behind it."""
    wanted = [(name, label.rstrip("}")) for name, _, label in (n.partition("{") for n in names)]
    return sum(
        float(sample[3])
        for sample in filter(None, map(_SAMPLE.match, metrics.splitlines()))
        if any(name == sample[1] and label in (sample[2] or "") for name, label in wanted)
    )


def task_count(tree: Any) -> int:
    """How many tasks there are in a tree of whatever shape: each is an object with a name."""
    text = json.dumps(tree)
    return text.count('"name":')


def table(before: Census, after: Census) -> list[str]:
    """What each process holds, after the turn and (before it)."""
    head: tuple[str, ...] = ("process", "life", "tasks", "sockets", "RSS MiB", *COLUMNS)
    rows: list[tuple[str, ...]] = [head]
    for name, held in after.processes.items():
        was = before.processes.get(name, held)
        rows.append((
            name,
            str(held.life or ""),
            _beside(held.tasks, was.tasks),
            _beside(held.sockets, was.sockets),
            _beside(held.rss >> 20, was.rss >> 20),
            *(f"{held.gauges[each]:g}" if each in held.gauges else "" for each in COLUMNS),
        ))  # fmt: skip
    lines = ["  ".join(f"{word:<14}" for word in row).rstrip() for row in rows]
    etcd = f"etcd: {after.keys} keys ({before.keys}), {after.leases} leases ({before.leases})"
    return [*lines, etcd]


def _beside(now: int | None, was: int | None) -> str:
    return "" if now is None else f"{now}" if was is None else f"{now} ({was})"


def complaints(before: Census, after: Census) -> list[str]:
    """What is held that was not, or more of it."""
    found = [f"at rest {each}" for each in after.busy]
    for name, held in after.processes.items():
        was = before.processes.get(name)
        if was is None:
            continue
        if held.sockets > was.sockets + SOCKETS_MORE and name not in ("etcd", "nats"):
            found.append(f"{name} holds {held.sockets} sockets, {was.sockets} before")
    if (after.keys, after.leases) != (before.keys, before.leases):
        found.append(
            f"etcd holds {after.keys} keys and {after.leases} leases,"
            f" {before.keys} and {before.leases} before"
        )
    return found
