"""The live set equals the simplest model, and never chooses whom it should not."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from properties.strategies import instances
from trinamo.runtime.protocol.discovery.instances import Instance, LiveSet, encode_instance


class LiveSetMachine(RuleBasedStateMachine):
    """The live set beside a dictionary of entries and one of inhibitions, under a moving clock."""

    live: LiveSet
    entries: dict[str, Instance]
    inhibited: dict[str, float]
    now: float

    @initialize()
    def open(self) -> None:
        self.live, self.entries, self.inhibited, self.now = LiveSet(), {}, {}, 0.0

    @rule(instance=instances)
    def put(self, instance: Instance) -> None:
        change = self.live.put(instance.key, encode_instance(instance))
        assert change.joined == (() if instance.key in self.entries else (instance,))
        assert not change.left
        assert not change.refused
        if self.entries.get(instance.key) != instance:
            self.inhibited.pop(instance.id, None)
        self.entries[instance.key] = instance

    @rule(instance=instances, value=st.binary(max_size=5))
    def put_garbage(self, instance: Instance, value: bytes) -> None:
        """A bad entry is refused; what was known under its key stays."""
        assert self.live.put(instance.key, value).refused

    @rule(instance=instances)
    def delete(self, instance: Instance) -> None:
        known = self.entries.pop(instance.key, None)
        self.inhibited.pop(instance.id, None)
        assert self.live.delete(instance.key).left == (() if known is None else (known,))

    @rule(found=st.lists(instances, unique_by=lambda i: i.key, max_size=4))
    def replace(self, found: list[Instance]) -> None:
        """A resync: exactly what it names is live, and the change says the difference."""
        fresh = {each.key: each for each in found}
        change = self.live.replace((key, encode_instance(i)) for key, i in fresh.items())
        assert {i.key for i in change.left} == self.entries.keys() - fresh.keys()
        assert {i.key for i in change.joined} == fresh.keys() - self.entries.keys()
        for key, instance in self.entries.items():
            if fresh.get(key) != instance:
                self.inhibited.pop(instance.id, None)
        self.entries = fresh

    @rule(instance=instances, lasts_s=st.integers(1, 10))
    def inhibit(self, instance: Instance, lasts_s: int) -> None:
        self.live.inhibit(instance.id, self.now + lasts_s)
        if instance.key in self.entries:
            self.inhibited[instance.id] = self.now + lasts_s

    @rule(instance=instances)
    def restore(self, instance: Instance) -> None:
        self.live.clear_inhibition(instance.id)
        self.inhibited.pop(instance.id, None)

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def it_holds_what_discovery_names(self) -> None:
        if not hasattr(self, "live"):
            return
        assert {i.key: i for i in self.live.instances} == self.entries
        assert len(self.live) == len(self.entries)

    @invariant()
    def it_offers_the_right_ones(self) -> None:
        """Nobody draining ever; nobody inhibited while another is open; somebody if possible."""
        if not hasattr(self, "live"):
            return
        inhibited = {i for i, until in self.inhibited.items() if until > self.now}
        assert self.live.inhibited_count(self.now) == len(inhibited)
        open_ids = {i.id for i in self.entries.values() if not i.draining}
        expected = (open_ids - inhibited) or open_ids
        assert {i.id for i in self.live.candidates(self.now)} == expected


TestLiveSet = LiveSetMachine.TestCase
