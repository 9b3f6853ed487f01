"""What is kept of an endpoint's instances says whom a request gets as a list of them all would."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection
from typing import Any
from unittest.mock import patch

import pytest
import trio
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.runtime.caller.requests import Request
from tests.runtime.caller.tables import Table, instance
from trinamo.runtime.caller.choices import Choices
from trinamo.runtime.caller.record import InstanceRecord
from trinamo.runtime.events.load import BusyLimits, LoadReport
from trinamo.runtime.protocol.discovery.candidates import (
    Candidates,
    Group,
    Policy,
    Ranking,
    Standing,
    pick,
)
from trinamo.runtime.protocol.discovery.presence import Presence, Sign

NUMBERS = st.integers(1, 4)
LIMITS = BusyLimits(waiting_tokens=2)
SIGNS = [Sign.SILENCE, Sign.UNANSWERED, Sign.HEARD, Sign.ACCEPTED, Sign.LAPSED, Sign.OUT_OF_GRACE]
CHOOSING = [each for each in Policy if each is not Policy.DIRECT]


def listed(
    records: list[InstanceRecord], now: float, exclude: Collection[str], among: Collection[str]
) -> list[InstanceRecord]:
    """Whom to choose from, found by going through all of them."""
    open_ = [each for each in records if not each.instance.draining and not each.is_foreign]
    asked = [r for r in open_ if r.instance.id not in exclude and r.instance.id in among]
    healthy = [each for each in asked if each.faulty_until <= now]
    named = [each for each in healthy if each.presence is not Presence.STALE]
    return healthy if 2 * len(named) < len(healthy) else named or asked


def taken(
    policy: Policy, left: list[InstanceRecord], turn: int, rng: random.Random
) -> InstanceRecord:
    """Whom the policy takes of a list."""
    match policy:
        case Policy.RANDOM:
            return left[rng.randrange(len(left))]
        case Policy.POWER_OF_TWO:
            return min(rng.sample(left, min(len(left), 2)), key=lambda each: each.load)
        case Policy.ROUND_ROBIN:
            return left[turn % len(left)]
        case _:
            first = turn % len(left)
            return min([*left[first:], *left[:first]], key=lambda each: each.load)


class ChoicesMachine(RuleBasedStateMachine):
    """Instances come, go, fail, are answered, fall silent, tell their load and drain."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.now, self.turn = Table(keeps=True, errors_max=2), 0.0, 0
        self.under_way: list[tuple[str, Request]] = []
        self.pools: list[frozenset[str]] = []
        """Sets of ids that are kept for a while."""

    def record(self, number: int) -> InstanceRecord | None:
        return self.table.get(f"{number:x}")

    def on_clock(self) -> Any:
        return patch.object(trio, "current_time", lambda: self.now)

    @rule(number=NUMBERS, draining=st.booleans(), incarnation=st.integers(1, 2))
    def put(self, number: int, draining: bool, incarnation: int) -> None:
        self.table.put(instance(number, draining=draining, incarnation=incarnation))

    @rule(number=NUMBERS)
    def delete(self, number: int) -> None:
        self.table.delete(instance(number).key)

    @rule(number=NUMBERS, stands=st.booleans())
    def connect(self, number: int, stands: bool) -> None:
        if (record := self.record(number)) is not None:
            if stands:
                self.table.connected(record, "tcp")
            else:
                self.table.disconnected(record)

    @rule(number=NUMBERS, sign=st.sampled_from(SIGNS))
    def see(self, number: int, sign: Sign) -> None:
        if (record := self.record(number)) is not None:
            self.table.step(record, sign)

    @rule(number=NUMBERS, lasts_s=st.integers(1, 5))
    def fail(self, number: int, lasts_s: int) -> None:
        if (record := self.record(number)) is not None:
            self.table.fault(record.instance, lasts_s=lasts_s)

    @rule(number=NUMBERS)
    def answer(self, number: int) -> None:
        if (record := self.record(number)) is not None:
            self.table.answer(record)

    @rule(number=NUMBERS, active=st.integers(0, 3), waiting=st.integers(0, 3))
    def report(self, number: int, active: int, waiting: int) -> None:
        if (record := self.record(number)) is not None:
            with self.on_clock():
                self.table.report(record, LoadReport(active, waiting_tokens=waiting))

    @rule(number=NUMBERS, payload_bytes=st.integers(0, 8))
    def begin(self, number: int, payload_bytes: int) -> None:
        if self.record(number) is not None:
            request = Request()
            request.payload_bytes = payload_bytes
            with self.on_clock():
                self.table.begin(f"{number:x}", request)
            self.under_way.append((f"{number:x}", request))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.under_way) - 1))
        self.table.end(*self.under_way.pop(at))

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 7.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.table.env.hand.at = self.now

    @rule(ids=st.frozensets(NUMBERS))
    def keep(self, ids: frozenset[int]) -> None:
        self.pools = [*self.pools[-1:], frozenset(f"{each:x}" for each in ids)]

    @rule(
        exclude=st.sets(NUMBERS, max_size=4), policy=st.sampled_from(CHOOSING), seed=st.integers(0)
    )
    def choose(self, exclude: set[int], policy: Policy, seed: int) -> None:
        """The same one is taken of what is kept as of the list, by the same dice."""
        gone = [f"{each:x}" for each in sorted(exclude)]
        for among in (None, *self.pools):
            left = listed([*self.table], self.now, gone, self.everybody if among is None else among)
            group, without = self.table.choices.asked(self.now, gone, among)
            assert [each for each in group.numbers if each not in without] == [
                each.number for each in left
            ]
            if left:
                got = pick(
                    policy,
                    group,
                    without,
                    turn=self.turn,
                    load=self.table.choices.load,
                    rng=random.Random(seed),
                )
                assert got == taken(policy, left, self.turn, random.Random(seed)).number
        self.turn += 1

    @property
    def everybody(self) -> set[str]:
        return {each.instance.id for each in self.table}

    @invariant()
    def it_says_what_a_list_would_say(self) -> None:
        """Whether anybody is there, is well, and is not busy."""
        choices = self.table.choices
        for among in (None, *self.pools):
            of = [r for r in self.table if among is None or r.instance.id in among]
            open_ = [each for each in of if not each.instance.draining]
            well = [each for each in open_ if each.faulty_until <= self.now]
            assert choices.has(self.now, Standing.STALE, among) == bool(well)
            reached = [each for each in of if each.is_reached]
            assert choices.has(self.now, Standing.FAULTY, among) == bool(reached)
            left = listed(of, self.now, (), self.everybody)
            group, _ = choices.asked(self.now, (), among)
            if left:
                least = taken(Policy.LEAST_LOADED, left, self.turn, random.Random(0))
                assert group.least(choices.load, self.turn, ()) == least.number
            is_busy = bool(left) and all(each.is_busy(LIMITS, self.now) for each in left)
            assert choices.is_busy(self.now, LIMITS, among) == is_busy
        assert len(choices._pools) <= 2
        assert all(math.isfinite(end) for end, _ in choices._ends)


TestChoices = ChoicesMachine.TestCase


def faults_never_end(self: Any, now: float, among: Collection[str] | None) -> Any:
    """Nobody waits for the end of a fault."""
    self._ends.clear()
    return pool(self, now, among)


def loads_stay(self: Any, number: int) -> None:
    """What is under way to one is what was when it came."""


def turns_are_not_mended(self: Group, turn: int, without: Collection[int]) -> int:
    """Those who are excluded have turns."""
    return self.numbers[turn % len(self.numbers)]


pool = Choices._pool
quick = settings(phases=[Phase.generate], database=None, max_examples=500)


@pytest.mark.parametrize(
    ("kind", "method", "mistake"),
    [
        pytest.param(*(Choices, "_pool", faults_never_end), marks=pytest.mark.check),
        (Ranking, "renew", loads_stay),
        (Group, "nth", turns_are_not_mended),
        (Candidates, "renew", loads_stay),
    ],
)
def test_a_planted_mistake_is_found(
    kind: type, method: str, mistake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, method, mistake)
    with pytest.raises((AssertionError, IndexError)):
        run_state_machine_as_test(ChoicesMachine, settings=quick)
