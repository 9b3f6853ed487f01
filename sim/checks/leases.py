"""I6 and I7: leases, and the identities that live under them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ..cluster_planes import STORE

if TYPE_CHECKING:
    from ..scenario import Outcome

__all__ = ["check"]

TICK_S: Final = 0.001
"""How late the store's own clock may notice that a lease is due."""


def check(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """What is wrong with any lease, or with any instance."""
    yield from _check_times(outcome)
    yield from _check_keys(outcome)
    yield from _check_identities(outcome)


def _check_times(outcome: Outcome) -> Iterator[tuple[str, str]]:
    ttl_s: dict[int, float] = {}
    renewed_s: dict[int, float] = {}
    idle_since_s = -math.inf
    for row in outcome.world.trace.rows:
        if row.kind in ("pause", "resume") and row.field("host") == STORE:
            # A store that was not running may notice late, never early.
            idle_since_s = row.time_s
        if not row.kind.startswith("store."):
            continue
        if row.kind == "store.restart":
            renewed_s = dict.fromkeys(row.field("leases"), row.time_s)
            continue
        lease = row.field("lease")
        match row.kind:
            case "store.grant":
                ttl_s[lease], renewed_s[lease] = row.field("ttl_s"), row.time_s
            case "store.renew":
                if lease not in renewed_s:
                    yield "I6", f"lease {lease} was renewed at {row.time_s:.3f} s, after its end"
                renewed_s[lease] = row.time_s
            case "store.revoke":
                renewed_s.pop(lease, None)
            case "store.expire":
                due_s = renewed_s.pop(lease, math.nan) + ttl_s[lease]
                if row.time_s < due_s - TICK_S:
                    yield "I6", f"lease {lease} ended {due_s - row.time_s:.3f} s early"
                if row.time_s > max(due_s, idle_since_s) + TICK_S:
                    yield "I6", f"lease {lease} ended {row.time_s - due_s:.3f} s late"


def _check_keys(outcome: Outcome) -> Iterator[tuple[str, str]]:
    store = outcome.cluster.store.store
    live = store.live_leases()
    for key, lease in store.holders().items():
        if lease and lease not in live:
            yield "I6", f"{key} outlived its lease {lease}"


def _check_identities(outcome: Outcome) -> Iterator[tuple[str, str]]:
    owners: dict[str, str] = {}
    incarnations: dict[str, int] = {}
    for row in outcome.world.trace.rows:
        if row.kind == "worker.serve":
            instance = row.field("instance")
            owner = owners.setdefault(instance, row.host)
            if owner != row.host:
                yield "I7", f"{owner} and {row.host} both are instance {instance}"
        elif row.kind == "lease.granted":
            number = row.field("incarnation")
            if number <= incarnations.get(row.host, 0):
                yield "I7", f"{row.host} is incarnation {number} again"
            incarnations[row.host] = number
