"""Random histories of a control plane, written down so that two planes can be compared.

A real server's revisions and lease ids are its own, so both are replaced: a revision by its rank
among all that the history saw, a lease by its number.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import trio

from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.planes import (
    ControlPlane,
    Delete,
    Entry,
    Put,
    PutOutcome,
    Snapshot,
    WatchEvent,
)

NAMES = ("a", "a/1", "a/2", "ab", "b/1", "b/2/x")
PREFIXES = ("", "a", "a/", "b/", "b/2")


class Revision(int):
    """A number that the server chose."""


class History:
    """Runs one seeded sequence of operations under a prefix, and records what came of it.

    What was revealed is in `facts`: (operation, result), where every revision stands as a `Revision`
    until `ranked` replaces them.
    """

    def __init__(self, plane: ControlPlane, prefix: str, seed: int) -> None:
        self._plane = plane
        self._prefix = prefix
        self._dice = random.Random(seed)
        self._leases: list[int] = [0]
        self._known: dict[str, int] = {}
        self.facts: list[Any] = []
        self._seen: set[int] = set()

    async def run(self, steps: int) -> None:
        """Do `steps` operations, all of them watched."""
        async with self._plane.watch(self._prefix) as events:
            await self._receive(events)
            for _ in range(steps):
                await self._step()
            # The last change that a watcher sees is one of our own, so nothing is missing.
            await self._plane.put(self._prefix + "end", b"")
            while await self._receive(events) != "end":
                pass

    async def _step(self) -> None:
        operation = self._dice.choice(
            ("put", "put", "guarded", "guarded", "delete", "delete_prefix", "get", "range",
             "grant", "keep_alive", "revoke")
        )  # fmt: skip
        name = self._dice.choice(NAMES)
        prefix = self._dice.choice(PREFIXES)
        lease = self._dice.randrange(len(self._leases))
        is_stale = self._dice.random() < 0.3
        value = self._dice.randbytes(3)
        try:
            result = await self._do(operation, name, prefix, lease, value, is_stale=is_stale)
        except TrinamoError as error:
            result = type(error).__name__
        self.facts.append((operation, name, prefix, lease, result))

    async def _do(  # noqa: PLR0911 -- one return for each operation
        self, operation: str, name: str, prefix: str, lease: int, value: bytes, *, is_stale: bool
    ) -> Any:
        plane, key, lease_id = self._plane, self._prefix + name, self._leases[lease]
        match operation:
            case "put":
                self._known[name] = await plane.put(key, value, lease_id=lease_id)
                return self._revision(self._known[name])
            case "guarded":
                guard = 0 if is_stale else self._known.get(name, 0)
                outcome = await plane.compare_and_put(
                    key, value, mod_revision=guard, lease_id=lease_id
                )
                return self._outcome(name, outcome)
            case "delete":
                return await plane.delete(key)
            case "delete_prefix":
                return await plane.delete_prefix(self._prefix + prefix)
            case "get":
                entry = await plane.get(key)
                return None if entry is None else self._entry(entry)
            case "range":
                return self._snapshot(await plane.range(self._prefix + prefix))
            case "grant":
                granted = await plane.grant_lease(600)
                self._leases.append(granted.id)
                return granted.ttl_s
            case "keep_alive":
                return await plane.keep_alive(lease_id)
            case _:
                return await plane.revoke_lease(lease_id)

    async def _receive(self, events: AsyncIterator[WatchEvent]) -> str:
        with trio.fail_after(120):
            event = await anext(events)
        if isinstance(event, Put):
            self.facts.append(("saw put", self._entry(event.entry)))
            return event.entry.key.removeprefix(self._prefix)
        if isinstance(event, Delete):
            key = event.key.removeprefix(self._prefix)
            self.facts.append(("saw delete", key, self._revision(event.revision)))
            return key
        self.facts.append((type(event).__name__, len(event.entries)))
        return ""

    def _outcome(self, name: str, outcome: PutOutcome) -> Any:
        if not outcome.succeeded:
            return False
        self._known[name] = outcome.revision
        return self._revision(outcome.revision)

    def _snapshot(self, snapshot: Snapshot) -> Any:
        return [self._entry(entry) for entry in snapshot.entries]

    def _entry(self, entry: Entry) -> Any:
        return (
            entry.key.removeprefix(self._prefix),
            entry.value,
            self._revision(entry.mod_revision),
            self._revision(entry.create_revision),
            self._leases.index(entry.lease_id),
        )

    def _revision(self, number: int) -> Revision:
        self._seen.add(number)
        return Revision(number)

    def ranked(self) -> Any:
        """The facts with every revision replaced by its rank."""
        ranks = {number: rank for rank, number in enumerate(sorted(self._seen))}
        return _ranked(self.facts, ranks)


def _ranked(fact: Any, ranks: dict[int, int]) -> Any:
    if isinstance(fact, Revision):
        return "rank", ranks[fact]
    return [_ranked(part, ranks) for part in fact] if isinstance(fact, list | tuple) else fact
