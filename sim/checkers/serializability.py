"""Serializability: transactions look as if they ran one after another, in some order.

Transactions append values to lists and read whole lists, as Elle's do (Kingsbury and Alvaro, "Elle:
Inferring Isolation Anomalies from Experimental Observations", 2020). A list shows everything that was
ever appended to it, in order; so what was read says who came before whom: who wrote what is read comes
before its reader (wr), who wrote a value before who wrote the next one (ww), and a reader before who
wrote what it did not see (rw). The transactions are serializable exactly if nobody comes before itself.

What this module does not do: other objects than lists, and rules about time; for single objects
`Linearizability` is the stronger rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from itertools import pairwise
from typing import Final, Literal

import attrs
from typing_extensions import override

from ..core.checker import Checker

State = Literal["open", "committed", "aborted"]
BEFORE: Final = {
    "wr": "the next one read what it appended to",
    "ww": "the next one appended after it to",
    "rw": "it did not see what the next one appended to",
}


@attrs.define(eq=False)
class Transaction:
    """What one client did at once. One that is `open` at the end may have been committed, or not."""

    client: str
    number: int
    state: State = "open"
    appended: list[tuple[Hashable, Hashable]] = attrs.field(factory=list)
    reads: list[tuple[Hashable, tuple[Hashable, ...], int]] = attrs.field(factory=list)
    """The list, what was in it, and how many values of its own it had appended anywhere by then."""

    def append(self, key: Hashable, value: Hashable) -> None:
        """It appends `value` to the list `key`; nobody ever appends the same to it twice."""
        self.appended.append((key, value))

    def read(self, key: Hashable, values: Iterable[Hashable]) -> None:
        """It read these values of the list `key`, with those that it had appended itself."""
        self.reads.append((key, tuple(values), len(self.appended)))

    def own(self, key: Hashable, count: int | None = None) -> tuple[Hashable, ...]:
        """What it appended to the list `key` among its first `count` appends; all if None."""
        return tuple(value for to, value in self.appended[:count] if to == key)

    def __str__(self) -> str:
        done = [f"append({key!r}, {value!r})" for key, value in self.appended]
        done += [f"read({key!r}) → {list(values)!r}" for key, values, _ in self.reads]
        return f"T{self.number} of {self.client}: {', '.join(done) or 'nothing'}"


class Serializability(Checker):
    """Judges the transactions that clients report, at the end of the run.

    history = world.watch(Serializability())
    transaction = history.begin("client1")
    transaction.append("x", 1)
    transaction.read("y", await read("y"))
    history.commit(transaction)
    """

    rule = "serializability"

    def __init__(self) -> None:
        self._transactions: list[Transaction] = []

    def begin(self, client: str) -> Transaction:
        """A client begins a transaction, which is told what it does by `append` and `read`."""
        self._transactions.append(Transaction(client, len(self._transactions) + 1))
        return self._transactions[-1]

    def commit(self, transaction: Transaction) -> None:
        """The client learns that it is committed."""
        self._ends(transaction, "committed")

    def abort(self, transaction: Transaction) -> None:
        """It certainly did not happen, and never will."""
        self._ends(transaction, "aborted")

    def _ends(self, transaction: Transaction, state: State) -> None:
        transaction.state = state
        self.say("transaction", state=state, text=str(transaction))

    @override
    def hints(self) -> Iterator[str]:
        if self._transactions and all(each.state != "committed" for each in self._transactions):
            yield "not one transaction was committed, and clients began some: nothing was judged"

    @override
    def at_end(self) -> None:
        writers = self._writers()
        committed = self._committed(writers)
        orders = self._orders(committed)
        self._check_places(orders, writers)
        circle = _circle(committed, _edges(committed, orders, writers))
        if circle:
            lines = "".join(f"\n  {each}\n    {why}" for each, why in circle)
            self.violate(
                "no order of the transactions explains what they read; each of these comes before"
                f" the next one, and the last before the first:{lines}"
            )

    def _writers(self) -> dict[tuple[Hashable, Hashable], Transaction]:
        writers: dict[tuple[Hashable, Hashable], Transaction] = {}
        for each in self._transactions:
            for key, value in each.appended:
                if (
                    writers.setdefault((key, value), each) is not each
                    or each.appended.count((key, value)) > 1
                ):
                    raise ValueError(
                        f"{value!r} was appended to {key!r} twice: give every append a value of its own"
                    )
        return writers

    def _committed(
        self, writers: dict[tuple[Hashable, Hashable], Transaction]
    ) -> list[Transaction]:
        """Those that were committed as somebody knows who was: by an answer, or by what was read."""
        committed = {each: None for each in self._transactions if each.state == "committed"}
        waiting = deque(committed)
        while waiting:
            reader = waiting.popleft()
            for key, values, _ in reader.reads:
                for value in values:
                    writer = writers.get((key, value))
                    if writer is None:
                        self.violate(f"nobody appended {value!r} to {key!r}\n  {reader}")
                    if writer.state == "aborted":
                        self.violate(f"what was aborted is read\n  {writer}\n  {reader}")
                    if writer not in committed:
                        committed[writer] = None
                        waiting.append(writer)
        return list(committed)

    def _orders(self, committed: list[Transaction]) -> dict[Hashable, tuple[Hashable, ...]]:
        """What every list was in the end, as far as it was read: all reads must be beginnings of it."""
        longest: dict[Hashable, tuple[tuple[Hashable, ...], Transaction]] = {}
        for each in committed:
            for key, values, count in each.reads:
                own = each.own(key, count)
                if values[len(values) - len(own) :] != own:
                    self.violate(f"a transaction does not read what it appended\n  {each}")
                if len(values) >= len(longest.get(key, ((), each))[0]):
                    longest[key] = values, each
        for each in committed:
            for key, values, _ in each.reads:
                order, other = longest[key]
                if order[: len(values)] != values or len(set(values)) < len(values):
                    self.violate(f"a list is read in two orders\n  {each}\n  {other}")
        return {key: order for key, (order, _) in longest.items()}

    def _check_places(
        self,
        orders: dict[Hashable, tuple[Hashable, ...]],
        writers: dict[tuple[Hashable, Hashable], Transaction],
    ) -> None:
        for key, order in orders.items():
            for writer in {writers[key, value]: None for value in order}:
                seen = tuple(value for value in order if writers[key, value] is writer)
                if seen != writer.own(key)[: len(seen)]:
                    self.violate(
                        f"appends of one transaction changed places: {key!r} is {list(order)!r}\n  {writer}"
                    )


_Edges = dict[Transaction, dict[Transaction, str]]


def _edges(
    committed: list[Transaction],
    orders: dict[Hashable, tuple[Hashable, ...]],
    writers: dict[tuple[Hashable, Hashable], Transaction],
) -> _Edges:
    """Who comes before whom, and why."""
    edges: _Edges = {each: {} for each in committed}
    for before, after, kind, key in _orderings(committed, orders, writers):
        if before is not after:
            edges[before].setdefault(after, f"{kind}: {BEFORE[kind]} {key!r}")
    return edges


def _orderings(
    committed: list[Transaction],
    orders: dict[Hashable, tuple[Hashable, ...]],
    writers: dict[tuple[Hashable, Hashable], Transaction],
) -> Iterator[tuple[Transaction, Transaction, str, Hashable]]:
    for key, order in orders.items():
        for one, other in pairwise(order):
            yield writers[key, one], writers[key, other], "ww", key
    for reader in committed:
        for key, values, count in reader.reads:
            others = len(values) - len(reader.own(key, count))
            if others:
                yield writers[key, values[others - 1]], reader, "wr", key
            following = orders[key][len(values) :]
            missed = [writers[key, following[0]]] if following else _unread(committed, key, values)
            for writer in missed:
                yield reader, writer, "rw", key


def _unread(
    committed: list[Transaction], key: Hashable, order: tuple[Hashable, ...]
) -> list[Transaction]:
    """Those that appended to the list what nobody read: the last that happened to it."""
    return [each for each in committed if any(value not in order for value in each.own(key))]


def _circle(committed: list[Transaction], edges: _Edges) -> list[tuple[Transaction, str]]:
    """The shortest way from a transaction back to itself, each with why it comes before the next."""
    shortest: list[Transaction] = []
    for start in committed:
        came_from: dict[Transaction, Transaction] = {}
        waiting = deque([start])
        while waiting and start not in came_from:
            each = waiting.popleft()
            for after in edges[each]:
                if after not in came_from:
                    came_from[after] = each
                    waiting.append(after)
        if start in came_from:
            way = [start]
            while (before := came_from[way[-1]]) is not start:
                way.append(before)
            if not shortest or len(way) < len(shortest):
                shortest = [start, *reversed(way[1:])]
    return [
        (each, edges[each][after])
        for each, after in zip(shortest, shortest[1:] + shortest[:1], strict=True)
    ]
