"""The live set equals the simplest model, keeps the requests under way, and chooses none it should not."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import trio
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from properties.strategies import instances
from tests.runtime.caller.tables import Table
from trinamo.runtime.caller.instances import Instances
from trinamo.runtime.caller.record import InstanceRecord
from trinamo.runtime.errors import DisconnectedError, UnavailableError
from trinamo.runtime.protocol.discovery.instances import Instance
from trinamo.runtime.protocol.discovery.presence import InFlight


class Request(InFlight):
    """It counts how often it was ended."""

    ended_count = 0

    def heard(self) -> int:
        return 0

    def fail(self, error: DisconnectedError) -> None:
        self.ended_count += 1


class LiveSetMachine(RuleBasedStateMachine):
    """The table beside a dictionary of entries, of inhibitions and of requests, under a moving clock."""

    table: Table
    entries: dict[str, Instance]
    inhibited: dict[str, float]
    strikes: dict[str, int]
    now: float
    under_way: dict[Request, str]
    """With the id of the instance."""
    probes: dict[str, Request]
    """What an instance that failed was sent first; all others wait for what becomes of it."""
    lost: set[Request]
    """What waited for its first item when its instance left."""
    records: list[InstanceRecord]
    """All that ever joined, each with a task."""

    @initialize()
    def open(self) -> None:
        self.table, self.entries, self.now = Table(), {}, 0.0
        self.inhibited, self.strikes = {}, {}
        self.under_way, self.probes, self.lost = {}, {}, set()
        self.records = self.table.joined

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
        self.leave({instance.id} if known else set())
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
        self.leave({self.entries[key].id for key in self.entries.keys() - fresh.keys()})
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
        self.probes.pop(instance.id, None)

    def leave(self, ids: set[str]) -> None:
        self.lost |= {each for each, at in self.under_way.items() if at in ids and each.is_waiting}

    @rule(instance=instances, is_waiting=st.booleans())
    def begin(self, instance: Instance, is_waiting: bool) -> None:
        request = Request(is_waiting=is_waiting)
        with patch.object(trio, "current_time", lambda: self.now):
            if instance.key not in self.entries:
                with pytest.raises(UnavailableError):
                    self.table.begin(instance.id, request)
                return
            self.table.begin(instance.id, request)
        self.under_way[request] = instance.id
        if self.strikes.get(instance.id):
            self.probes.setdefault(instance.id, request)

    @precondition(lambda self: self.under_way)
    @rule(number=st.integers(0, 99), is_over=st.booleans())
    def go_on(self, number: int, is_over: bool) -> None:
        """One that is under way has its first item, or its end."""
        request = list(self.under_way)[number % len(self.under_way)]
        request.is_waiting = False
        if is_over:
            at = self.under_way.pop(request)
            self.table.end(at, request)
            if self.probes.get(at) is request:
                del self.probes[at]

    @rule(instance=instances, lasts_s=st.integers(1, 10))
    def inhibit(self, instance: Instance, lasts_s: int) -> None:
        if instance.key in self.entries:
            self.table.fault(instance, lasts_s=lasts_s)
            until, strikes = self.inhibited.get(instance.id, 0.0), self.strikes.get(instance.id, 0)
            if until <= self.now:
                self.strikes[instance.id] = strikes = min(strikes + 1, 5)
            grown = self.now + min(lasts_s * 2 ** (strikes - 1), 60)
            self.inhibited[instance.id] = max(until, grown)
            self.probes.pop(instance.id, None)

    @rule(instance=instances)
    def restore(self, instance: Instance) -> None:
        record = self.table.get(instance.id)
        if record is not None:
            self.table.answer(record)
        self.inhibited.pop(instance.id, None)
        self.probes.pop(instance.id, None)
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
        inhibited = {i for i, until in self.inhibited.items() if until > self.now} | {*self.probes}
        open_ids = {i.id for i in self.entries.values() if not i.draining}
        expected = (open_ids - inhibited) or open_ids
        assert {i.id for i in self.table.candidates(self.now)} == expected

    @invariant()
    def it_keeps_requests_until_their_end_and_nobody_longer(self) -> None:
        """Also those whose instance has left or come back; what waited for a first item, ended once."""
        if not hasattr(self, "table"):
            return
        ids = {each.id for each in self.entries.values()}
        assert self.table.in_flight == len(self.under_way)
        for each in ids:
            assert self.table.load(each) == [*self.under_way.values()].count(each)
        assert {each for each in self.under_way if each.ended_count} <= self.lost
        assert all(each.ended_count == 1 for each in self.lost)
        kept = [record for record in self.records if not record.is_over]
        assert sorted(record.instance.id for record in kept) == sorted(
            ids | {*self.under_way.values()}
        )
        assert set(self.table._records) == ids | {*self.under_way.values()}


TestLiveSet = LiveSetMachine.TestCase


def whoever_left_stays(self: Any, record: InstanceRecord) -> None:
    """Nothing is forgotten when the last request ends."""


def requests_stay_behind(self: Any, instance: Instance) -> None:
    """Who comes back has none of the requests that it left with."""
    self._records.pop(instance.id, None)
    join(self, instance)


join = Instances._join
quick = settings(phases=[Phase.generate], database=None)


@pytest.mark.parametrize(
    ("method", "mistake"),
    [("_forget_if_over", whoever_left_stays), ("_join", requests_stay_behind)],
)
def test_a_planted_mistake_is_found(
    method: str, mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Instances, method, mistake)
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(LiveSetMachine, settings=quick)
