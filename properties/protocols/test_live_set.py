"""The live set equals the simplest model, and never chooses whom it should not."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from properties.strategies import instances
from tests.runtime.caller.tables import Table
from trinamo.runtime.protocol.discovery.instances import Instance


class LiveSetMachine(RuleBasedStateMachine):
    """The table beside a dictionary of entries and one of inhibitions, under a moving clock."""

    table: Table
    entries: dict[str, Instance]
    inhibited: dict[str, float]
    strikes: dict[str, int]
    now: float

    @initialize()
    def open(self) -> None:
        self.table, self.entries, self.now = Table(), {}, 0.0
        self.inhibited, self.strikes = {}, {}

    @rule(instance=instances)
    def put(self, instance: Instance) -> None:
        self.table.put(instance)
        assert [each for kind, each in self.table.notes if kind == "instance.join"] == (
            [] if instance.key in self.entries else [instance.id]
        )
        if self.entries.get(instance.key) != instance:
            self.forget(instance)
        self.entries[instance.key] = instance

    @rule(instance=instances)
    def delete(self, instance: Instance) -> None:
        known = self.entries.pop(instance.key, None)
        self.forget(instance)
        self.table.delete(instance.key)
        left = [each for kind, each in self.table.notes if kind == "instance.leave"]
        assert left == ([] if known is None else [known.id])

    @rule(
        found=st.lists(st.tuples(instances, st.booleans()), unique_by=lambda i: i[0].id, max_size=4)
    )
    def replace(self, found: list[tuple[Instance, bool]]) -> None:
        """A resync: exactly what it names is live; what it names and is refused stays as it is."""
        named = {each.key: None if is_refused else each for each, is_refused in found}
        fresh = {
            key: each or self.entries[key]
            for key, each in named.items()
            if each is not None or key in self.entries
        }
        self.table.replace(named)
        notes = self.table.notes
        left = {each for kind, each in notes if kind == "instance.leave"}
        joined = {each for kind, each in notes if kind == "instance.join"}
        assert left == {self.entries[key].id for key in self.entries.keys() - fresh.keys()}
        assert joined == {fresh[key].id for key in fresh.keys() - self.entries.keys()}
        for key, instance in self.entries.items():
            if fresh.get(key) != instance:
                self.forget(instance)
        self.entries = fresh

    def forget(self, instance: Instance) -> None:
        self.inhibited.pop(instance.id, None)
        self.strikes.pop(instance.id, None)

    @rule(instance=instances, lasts_s=st.integers(1, 10))
    def inhibit(self, instance: Instance, lasts_s: int) -> None:
        if instance.key in self.entries:
            self.table.fault(instance, lasts_s=lasts_s)
            until, strikes = self.inhibited.get(instance.id, 0.0), self.strikes.get(instance.id, 0)
            if until <= self.now:
                self.strikes[instance.id] = strikes = min(strikes + 1, 5)
            grown = self.now + min(lasts_s * 2 ** (strikes - 1), 60)
            self.inhibited[instance.id] = max(until, grown)

    @rule(instance=instances)
    def restore(self, instance: Instance) -> None:
        record = self.table.get(instance.id)
        if record is not None:
            record.breaker.answer()
        self.inhibited.pop(instance.id, None)
        self.strikes[instance.id] = max(self.strikes.get(instance.id, 0) - 1, 0)

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.table.env.hand.at = self.now

    @invariant()
    def it_holds_what_discovery_names(self) -> None:
        if not hasattr(self, "table"):
            return
        assert {i.key: i for i in self.table.instances} == self.entries

    @invariant()
    def it_offers_the_right_ones(self) -> None:
        """Nobody draining ever; nobody inhibited while another is open; somebody if possible."""
        if not hasattr(self, "table"):
            return
        inhibited = {i for i, until in self.inhibited.items() if until > self.now}
        open_ids = {i.id for i in self.entries.values() if not i.draining}
        expected = (open_ids - inhibited) or open_ids
        assert {i.id for i in self.table.candidates(self.now)} == expected


TestLiveSet = LiveSetMachine.TestCase
