"""I6 and I7: leases, and the identities that live under them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import attrs

from ..cluster.services import STORE

if TYPE_CHECKING:
    from ..cluster.outcome import Outcome
    from ..core.trace import Row


TICK_S: Final = 0.001
"""How late the store's own clock may notice that a lease is due."""


def check(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """What is wrong with any lease, or with any instance."""
    yield from _check_times(outcome)
    yield from _check_keys(outcome)
    yield from _check_identities(outcome)


def _check_times(outcome: Outcome) -> Iterator[tuple[str, str]]:
    table = _Leases()
    for row in outcome.told:
        if row.kind in _AWAY and row.field("host") == STORE:
            table.is_away = _AWAY[row.kind]
            # A store that was not running may notice late, never early.
            table.idle_since_s = row.time_s
        elif row.kind == "store.load":
            # A backup, whose leases are those of its time.
            table.renewed_s = dict.fromkeys(row.field("leases"), row.time_s)
        elif row.kind.startswith("store."):
            yield from (("I6", text) for text in table.take(row))
    yield from (("I6", text) for text in table.overdue(outcome.world.ended_s))


_AWAY: Final = {
    "pause": True,
    "kill": True,
    "power_off": True,
    "exit": True,
    "resume": False,
    "boot": False,
}
"""Which rows about its process say that the store does not run from now on, or does."""


@attrs.define
class _Leases:
    """The leases alive, as the store's notes tell of them."""

    ttl_s: dict[int, float] = attrs.Factory(dict)
    renewed_s: dict[int, float] = attrs.Factory(dict)
    idle_since_s: float = -math.inf
    is_away: bool = False

    def take(self, row: Row) -> Iterator[str]:
        """One thing the store did to a lease, and what is wrong with it."""
        if row.kind == "store.restart":
            known = [lease for lease in row.field("leases") if lease in self.renewed_s]
            for lease in sorted(set(row.field("leases")) - set(known)):
                yield f"lease {lease} is there after a restart, and was not before"
            self.renewed_s = dict.fromkeys(known, row.time_s)
            return
        lease = row.field("lease")
        if row.kind == "store.grant":
            if lease in self.ttl_s:
                yield f"lease {lease} was granted twice"
            self.ttl_s[lease] = row.field("ttl_s")
        elif row.kind == "store.renew" and lease not in self.renewed_s:
            yield f"lease {lease} was renewed at {row.time_s:.3f} s, after its end"
        elif row.kind == "store.renew":
            yield from self._outlived(lease, row.time_s)
        if row.kind in ("store.grant", "store.renew"):
            self.renewed_s[lease] = row.time_s
        elif row.kind == "store.revoke":
            self.renewed_s.pop(lease, None)
        elif row.kind == "store.expire":
            yield from self._expired(lease, row.time_s)

    def _expired(self, lease: int, time_s: float) -> Iterator[str]:
        renewed_s = self.renewed_s.pop(lease, None)
        if renewed_s is None or lease not in self.ttl_s:
            yield f"lease {lease} ended at {time_s:.3f} s, and was not alive"
            return
        due_s = renewed_s + self.ttl_s[lease]
        if time_s < due_s - TICK_S:
            yield f"lease {lease} ended {due_s - time_s:.3f} s early"
        if time_s > max(due_s, self.idle_since_s) + TICK_S:
            yield f"lease {lease} ended {time_s - due_s:.3f} s late"

    def overdue(self, time_s: float) -> Iterator[str]:
        """Leases that should have ended before `time_s`, and did not."""
        for lease in self.renewed_s:
            yield from self._outlived(lease, time_s)

    def _outlived(self, lease: int, time_s: float) -> Iterator[str]:
        due_s = max(self.renewed_s[lease] + self.ttl_s.get(lease, 0.0), self.idle_since_s)
        if not self.is_away and time_s > due_s + TICK_S:
            yield f"lease {lease} was due at {due_s:.3f} s, and lives at {time_s:.3f} s"


def _check_keys(outcome: Outcome) -> Iterator[tuple[str, str]]:
    store = outcome.cluster.store
    live = store.live_leases()
    for key, lease in store.holders().items():
        if lease and lease not in live:
            yield "I6", f"{key} outlived its lease {lease}"


def _check_identities(outcome: Outcome) -> Iterator[tuple[str, str]]:
    owners: dict[str, str] = {}
    incarnations: dict[str, int] = {}
    for row in outcome.told:
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
