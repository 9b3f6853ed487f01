"""Workers that fall silent over a request, and those that are slow: who is given up, and who is asked.

A request that blocks a worker's process would block the next one as well. So no third worker has it; but
whoever answers, however slow it is, is silent for nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import attrs
import pytest
import trio
from hypothesis import given, strategies as st

from properties.simulated.test_cluster_survives import DECISIONS_MAX, ROUTERS, STREAMS, examples
from trinamo.runtime.caller import search
from trinamo.runtime.caller.attempts import StreamAttempt
from trinamo.runtime.errors import DisconnectedError, SilentError
from trinamo.sim import Choices, SeedChoices
from trinamo.sim.cluster.outcome import Outcome
from trinamo.sim.cluster.plans import FaultPlan, Scenario
from trinamo.sim.cluster.workload import COMPLETE
from trinamo.sim.core.checker import Checker
from trinamo.sim.core.trace import Row
from trinamo.sim.scenario import run
from trinamo.sim.scenario.driver import ClusterDriver
from trinamo.sim.scenario.file import parse_scenario
from trinamo.sim.strategies import choices

SCENARIO = """
name = "silent"
about = "Some requests stop the worker that has them, and all workers are slow."
[cluster]
workers = {workers}
[cluster.config]
"router.policy" = "{policy}"
"router.silence_grace_s" = {grace_s}
"control_plane.etcd.lease_ttl_s" = 2
[engine]
speedup_ratio = {speed}
[[workload]]
clients = 4
requests = 2
output_tokens = [5, 20]
[limits]
end_s = 200.0
idle_s = 100.0
settle_s = 200.0
"""
FROZEN_S = 30.0
"""For so long a worker is stopped: more than any silence takes to be seen."""


class Poison(Checker):
    """Stops whoever has begun one of these requests, so long after that, if it has it still."""

    def __init__(self, outcome: Outcome, names: frozenset[str], after_s: float) -> None:
        self.world, self.names, self.after_s = outcome.world, names, after_s
        self.attempts: set[object] = set()
        self.spans: dict[str, list[float]] = {}
        """When each worker was stopped."""

    def on(self, note: Row) -> None:
        if note.kind == "engine.begin" and note.field("request") in self.names:
            self.attempts.add(note.field("attempt"))
            host = note.host.rpartition(".")[0]
            self.world.after(self.after_s, self.strike, host, note.field("attempt"))
        elif note.kind == "engine.end":
            self.attempts.discard(note.field("attempt"))

    def strike(self, host: str, attempt: object) -> None:
        spans = self.spans.setdefault(host, [])
        if attempt in self.attempts and not spans:
            spans.append(self.world.current_time())
            self.world.pause(host)
            self.world.after(FROZEN_S, self.world.resume, host)


@attrs.define
class Held:
    """What became of one request at the workers that had it, as its caller believed."""

    tried: list[str] = attrs.Factory(list)
    silent: list[tuple[str, float]] = attrs.Factory(list)
    """Instances, and when they were given up."""
    tried_after: list[str] = attrs.Factory(list)
    """Instances that were asked although two had fallen silent."""


@contextmanager
def noted() -> Iterator[dict[str, Held]]:
    """What callers do, by the name of the request."""
    found: dict[str, Held] = {}
    start, fail = StreamAttempt.__init__, StreamAttempt.fail

    def begin(self: Any, instance: Any, context: Any, *more: Any, **options: Any) -> None:
        held = found.setdefault(context.id.partition("-")[0], Held())
        (held.tried_after if len(held.silent) > 1 else held.tried).append(instance.id)
        start(self, instance, context, *more, **options)

    def end(self: Any, error: DisconnectedError) -> None:
        if isinstance(error, SilentError):
            held = found[self.context.id.partition("-")[0]]
            held.silent.append((self.instance.id, trio.current_time()))
        fail(self, error)

    with patch.object(StreamAttempt, "__init__", begin), patch.object(StreamAttempt, "fail", end):
        yield found


def broken(
    scenario: Scenario, choices: Choices, names: frozenset[str], after_s: float, bug: str = ""
) -> Iterator[str]:
    """What is wrong with a run in which these requests stop who has them."""
    poisons: list[Poison] = []

    def poisoned(scenario: Scenario, outcome: Outcome) -> Any:
        poisons.append(outcome.world.watch(Poison(outcome, names, after_s)))
        return ClusterDriver(scenario, outcome)

    with noted() as found, patch.object(run, "ClusterDriver", poisoned):
        outcome = run.run_scenario(scenario, choices, bug=bug)
    yield from map(str, outcome.violations)
    hosts = {
        row.field("instance"): row.host.rpartition(".")[0]
        for row in outcome.world.trace.of_kind("worker.serve")
    }
    (poison,) = poisons
    for name, held in found.items():
        if held.tried_after:
            yield f"{name} was tried at a third worker"
        for instance, at_s in held.silent:
            spans = poison.spans.get(hosts[instance], [])
            if not any(began_s <= at_s <= began_s + FROZEN_S for began_s in spans):
                yield f"{hosts[instance]} was called silent at {at_s:.3f} s, and answers"
    for record in outcome.cluster.records:
        silences = len(found[record.name].silent) if record.name in found else 0
        if silences < 2 and record.outcome != COMPLETE:
            yield f"{record.name} ended with {record.outcome} after {silences} silences"


@st.composite
def scenarios(draw: st.DrawFn, poisons: int) -> Scenario:
    """One worker more than the requests can stop; some are so slow that they must be asked."""
    grace_s, speed = draw(st.sampled_from([(1, 0.01), (2, 0.05), (2, 1.0)]))
    text = SCENARIO.format(
        workers=2 * poisons + 1,
        policy=draw(ROUTERS),
        grace_s=grace_s,
        speed=speed,
    )
    away = st.builds(
        FaultPlan,
        do=st.just("kill"),
        on=st.just("store"),
        at=st.integers(0, 30).map(lambda tenths: tenths / 10),
        lasts_s=st.integers(1, 60).map(lambda tenths: tenths / 10),
    )
    faults = tuple(draw(st.lists(away, max_size=1)))
    return attrs.evolve(parse_scenario(text), faults=faults).on(draw(STREAMS))


@examples(6)
@given(st.data(), choices(decisions_max=DECISIONS_MAX))
def test_a_request_makes_two_workers_silent_at_most_and_who_answers_is_never_called_so(
    data: st.DataObject, choices: Choices
) -> None:
    """All other requests are answered whole, unless two of those workers had them as well."""
    names = data.draw(st.sets(st.sampled_from(["client0.0", "client1.1"])))
    after_s = data.draw(st.sampled_from([0.0, 0.001, 0.05, 0.5]))
    scenario = data.draw(scenarios(len(names)))
    assert list(broken(scenario, choices, frozenset(names), after_s)) == []


SLOW = {"policy": "random", "grace_s": 1, "speed": 0.002}


def test_a_caller_that_does_not_count_silences_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_SILENCES_MAX", 9)
    scenario = parse_scenario(SCENARIO.format(workers=4, **{**SLOW, "speed": 1.0}))
    wrong = list(broken(scenario, SeedChoices(1), frozenset({"client0.0"}), 0.0))
    assert "client0.0 was tried at a third worker" in wrong


def test_a_caller_that_hears_no_answers_is_found() -> None:
    scenario = parse_scenario(SCENARIO.format(workers=2, **SLOW))
    wrong = broken(scenario, SeedChoices(1), frozenset(), 0.0, bug="answers_unheard")
    assert any("was called silent" in each for each in wrong)
