"""The strategies for simulated runs find what seeds find, shrink as lists do, and draw what can be played."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest
import trio
from hypothesis import HealthCheck, Phase, find, given, settings, strategies as st

from tests.sim.checkers.protocols import REPLICAS, election, replicated_register
from trinamo.sim import Choices, Fault, Network, Policy, SeedChoices, Violation, World, arm
from trinamo.sim.explore import run
from trinamo.sim.strategies import choices, fault_plans, schedules

BROKEN: dict[str, Callable[[Choices], object]] = {
    "register": replicated_register,
    "election": election,
}
MENDED = {
    "register": partial(replicated_register, writes_back=True),
    "election": partial(election, remembers_its_vote=True),
}
EXAMPLES_MAX = 300
STEADY = settings(
    max_examples=EXAMPLES_MAX,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def played_until_broken(play: Callable[[Choices], object], phases: list[Phase]) -> list[Choices]:
    """All the choices that hypothesis made until it was content; the last ones fail."""
    made: list[Choices] = []

    def test(drawn: Choices) -> None:
        made.append(drawn)
        play(drawn)

    with pytest.raises(Violation):
        settings(STEADY, phases=phases)(given(choices())(test))()
    return made


@pytest.mark.parametrize("name", BROKEN)
def test_drawn_choices_find_a_bug_in_about_as_many_examples_as_seeds(name: str) -> None:
    """The seeds that fail are 2 to 10 in 100; so a strategy that is no worse needs 10 to 50 examples."""
    failing = sum(run(BROKEN[name], seed).finding is not None for seed in range(100))
    examples = len(played_until_broken(BROKEN[name], [Phase.generate]))
    assert failing > 0
    assert examples <= 8 * 100 / failing


@pytest.mark.check
@pytest.mark.parametrize("name", ["register", "election"])
def test_drawn_choices_shrink_to_the_decisions_that_matter(name: str) -> None:
    """What is left is few decisions, each of which fails no more if it is the default."""
    last = played_until_broken(BROKEN[name], [Phase.generate, Phase.shrink])[-1]
    assert sum(value != 0 for value in last.values) <= 6
    assert last.seed == 0
    assert repr(last).startswith("ReplayChoices([")


@pytest.mark.parametrize("name", MENDED)
@settings(STEADY, max_examples=40)
@given(drawn=choices(), policy=schedules())
def test_a_mended_protocol_holds_whatever_is_drawn(
    name: str, drawn: Choices, policy: Policy
) -> None:
    """No decisions and no schedule break it."""
    MENDED[name](drawn, policy=policy)


@settings(STEADY, max_examples=50)
@given(answers=st.lists(st.integers(2, 5), max_size=40), drawn=choices(decisions_max=16))
def test_every_decision_has_an_answer_however_many_are_asked(
    answers: list[int], drawn: Choices
) -> None:
    """Answers are in range, beyond those that were drawn too, and what is recorded replays them."""
    given_back = [drawn.below(n, "die") for n in answers]
    assert all(0 <= value < n for value, n in zip(given_back, answers, strict=True))
    assert drawn.values == given_back


def test_choices_shrink_to_the_default_run() -> None:
    simplest = find(choices(decisions_max=8), lambda _: True)
    assert [simplest.below(9, "die") for _ in range(20)] == [0] * 20


def test_the_number_of_drawn_decisions_is_bounded() -> None:
    with pytest.raises(ValueError, match="from 1 to 2048"):
        choices(decisions_max=4000)


@settings(STEADY, max_examples=20)
@given(
    plan=fault_plans(REPLICAS, notes=["beat"], until_s=2.0),
    seed=st.integers(0, 99),
    policy=schedules(),
)
def test_any_plan_can_be_armed_and_is_undone(plan: list[Fault], seed: int, policy: Policy) -> None:
    """A plan survives JSON; whatever it does, all hosts are up and reach each other in the end."""
    assert json.loads(json.dumps(plan)) == plan
    world = World(SeedChoices(seed), policy=policy)
    network = Network(world)

    async def beat() -> None:
        while True:
            world.note("beat")
            await trio.sleep(0.1)

    async def main() -> None:
        for name in REPLICAS:
            world.boot(name, beat)
        arm(world, network, plan, boot=lambda name: world.boot(name, beat))
        await trio.sleep(30)
        assert {str(world.host(name).state) for name in REPLICAS} == {"HostState.UP"}
        links = [network.link(a, b) for a in REPLICAS for b in REPLICAS if a != b]
        assert not any(link.is_cut for link in links)

    world.run(main)


def test_plans_and_schedules_shrink_to_the_dullest() -> None:
    assert find(fault_plans(["a", "b"]), lambda _: True) == []
    cut = find(fault_plans(["a", "b"], kinds=["cut"]), lambda plan: len(plan) > 0)
    assert cut == [{"do": "cut", "host": "a", "at_s": 0.0, "to": "b", "for_s": 0.001}]
    assert find(schedules(), lambda _: True) == "fifo"
    assert find(schedules(["pct", "step"]), lambda _: True) == "step"


def test_a_plan_needs_a_host_and_a_link_needs_two() -> None:
    with pytest.raises(ValueError, match="needs a host"):
        fault_plans([])
    with pytest.raises(ValueError, match="needs a host"):
        fault_plans(["a"], kinds=["cut"])
