"""I13: what a watch tells, against what the store holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..cluster.outcome import Outcome


def check(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """Revisions that go back within one watch, and watches that do not begin with a snapshot."""
    seen: dict[tuple[str, str], int] = {}
    for row in outcome.told:
        if row.kind != "watch.event":
            continue
        watch, revision = (row.host, row.field("watch")), row.field("revision")
        if watch not in seen and row.field("what") != "Snapshot":
            yield "I13", f"watch {watch[1]} began with a {row.field('what')}"
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
