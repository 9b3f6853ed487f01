"""The searches find the planted stale acknowledgement (S10), and nothing in the fenced queue."""

from __future__ import annotations

import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import trio

from trinamo.sim import (
    Choices,
    LabelledChoices,
    PrefixChoices,
    ReplayChoices,
    SeedChoices,
    Violation,
    World,
)
from trinamo.sim.explore import (
    Failure,
    Finding,
    Progress,
    Scenario,
    check_determinism,
    explore_bounded,
    pin,
    run,
    shrink,
    swarm,
)

FENCED = Scenario("trinamo.sim.programs.leased_queue")
STALE_ACK = FENCED.changed(fenced=False)


def failing_seed(scenario: Scenario = STALE_ACK) -> int:
    return next(seed for seed in range(200) if run(scenario, seed).finding)


def test_a_swarm_finds_the_planted_bug_and_counts_it_as_one() -> None:
    seen: list[int] = []
    progress = swarm(STALE_ACK, range(60), on_progress=lambda p: seen.append(p.runs))
    assert progress.runs == 60
    assert list(progress.failures) == ["I8: job # is committed under token # and #"]
    kind = next(iter(progress.failures.values()))
    assert kind.count == progress.failed_runs
    assert kind.first.seed == failing_seed()
    assert seen == [8, 16, 24, 32, 40, 48, 56, 60]


def test_a_swarm_finds_nothing_in_the_fenced_queue() -> None:
    assert swarm(FENCED, range(100)).failures == {}


@pytest.mark.check
def test_a_swarm_over_processes_finds_the_same() -> None:
    alone, together = swarm(STALE_ACK, range(100)), swarm(STALE_ACK, range(100), jobs=2)
    assert _summary(alone) == _summary(together)


def test_what_a_swarm_found_when_it_is_ended_does_not_depend_on_its_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FoundError(Exception):
        pass

    def ended(jobs: int | None) -> Any:
        seen: list[Any] = []

        def stop(progress: Progress) -> None:
            seen.append(_summary(progress))
            if progress.failures:
                raise FoundError

        with pytest.raises(FoundError):
            swarm(STALE_ACK, range(200), jobs=jobs, on_progress=stop)
        return seen

    # At once, so that the cores take over before the failure shows.
    for others in ("FORKED_AFTER_S", "SPAWNED_AFTER_S"):
        monkeypatch.setattr(sys.modules[swarm.__module__], others, 0.0)
    assert ended(1) == ended(2) == ended(None)


def _summary(progress: Progress) -> Any:
    kinds = {key: (kind.count, kind.first) for key, kind in progress.failures.items()}
    return progress.runs, progress.failed_runs, progress.steps, kinds


def test_a_progress_callback_ends_an_endless_swarm() -> None:
    class EnoughError(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.runs >= 16:
            raise EnoughError

    with pytest.raises(EnoughError):
        swarm(FENCED, iter(int, 1), on_progress=stop)


@pytest.mark.parametrize("policy", ["grouped", "choice", "fifo"])
def test_the_bounded_search_is_complete_and_finds_the_bug_with_one_deviation(policy: str) -> None:
    bound = 1
    fenced = explore_bounded(FENCED.changed(policy=policy), max_deviations=bound)
    assert fenced.is_complete
    assert fenced.failed_runs == 0
    buggy = explore_bounded(STALE_ACK.changed(policy=policy), max_deviations=bound)
    assert buggy.is_complete
    assert buggy.first is not None
    assert buggy.first.deviation_count == 1


@pytest.mark.check
def test_no_run_of_the_fenced_queue_within_three_deviations_breaks_it() -> None:
    search = explore_bounded(FENCED, max_deviations=3)
    assert search.is_complete
    assert search.failed_runs == 0
    assert sum(search.runs_by_deviations) == search.runs > 400


def test_the_bounded_search_visits_every_combination_once() -> None:
    seen: list[tuple[int, ...]] = []

    def play(choices: Choices) -> None:
        async def main() -> None:
            seen.append(tuple(choices.below(n, "die") for n in (2, 3, 2)))
            await trio.lowlevel.checkpoint()

        World(choices, policy="fifo").run(main)

    assert explore_bounded(play, max_deviations=3).is_complete
    assert len(seen) == len(set(seen)) == 12
    assert [sum(v != 0 for v in values) for values in seen] == [0] + [1] * 4 + [2] * 5 + [3] * 2
    seen.clear()
    assert explore_bounded(play, max_deviations=2).runs == 10
    assert not explore_bounded(play, max_deviations=2, runs_max=5).is_complete
    assert explore_bounded(play, max_deviations=2, labels=("other",)).runs == 1


def test_a_bounded_search_says_how_many_runs_there_are_and_what_it_did_not_vary() -> None:
    def play(choices: Choices) -> None:
        async def main() -> None:
            for n, label in ((4, "cut a"), (4, "cut b"), (16, "jitter a-b")):
                choices.below(n, label)
            await trio.lowlevel.checkpoint()

        World(choices).run(main)

    expected: list[int] = []
    whole = explore_bounded(
        play, max_deviations=2, on_progress=lambda search: expected.append(search.expected_runs)
    )
    assert whole.is_complete
    # Three other answers for each cut, and one for the jitter: all of it.
    assert (expected[0], whole.runs) == (1 + 7 + 9 + 3 + 3, 23)
    assert whole.fixed == {"jitter a-b between none and all", "the order of steps"}
    cuts = explore_bounded(play, max_deviations=2, labels=("cut *",))
    assert cuts.runs == explore_bounded(play, max_deviations=2, without=("jitter*",)).runs == 16
    assert cuts.fixed == {"jitter a-b", "the order of steps"}


def test_shrinking_leaves_one_decision_of_the_planted_bug() -> None:
    shrunk = shrink(STALE_ACK, SeedChoices(failing_seed()))
    assert shrunk.is_finished
    assert [choice.label for choice in shrunk.record if choice.value] == ["work"]
    assert shrunk.run.finding is not None
    assert shrunk.run.finding.invariant == "I8"
    assert run(shrunk.scenario, ReplayChoices(shrunk.run.values, shrunk.run.seed)) == shrunk.run


def test_shrinking_drops_the_faults_that_are_not_needed() -> None:
    faults = [
        {"do": "pause", "host": "worker1", "at_s": 0.0, "for_s": 1.0},
        {"do": "pause", "host": "worker0", "at_s": 0.1, "for_s": 1.5},
        {"do": "kill", "host": "worker1", "at_s": 5.0, "for_s": 1.0},
        {"do": "cut", "host": "worker1", "at_s": 5.0, "for_s": 1.0},
        {"do": "power_off", "host": "worker1", "at_s": 7.0},
    ]
    scenario = STALE_ACK.changed(faults=faults)
    assert run(scenario, ReplayChoices([])).finding is not None
    shrunk = shrink(scenario, SeedChoices(failing_seed(scenario)))
    assert len(shrunk.scenario.parameters["faults"]) + shrunk.run.deviation_count == 1


def test_shrinking_stops_when_its_time_is_up() -> None:
    shrunk = shrink(STALE_ACK, SeedChoices(failing_seed()), cpu_s_max=0.0)
    assert not shrunk.is_finished
    assert shrunk.run.finding is not None


def test_a_run_that_passes_cannot_be_shrunk_pinned_or_filed() -> None:
    good = run(FENCED, 1)
    with pytest.raises(ValueError, match="does not fail"):
        shrink(FENCED, SeedChoices(1))
    with pytest.raises(ValueError, match="does not fail"):
        pin(FENCED, good)
    with pytest.raises(ValueError, match="does not fail"):
        Failure.of(FENCED, good)


def test_pinning_shows_when_the_failure_becomes_inevitable() -> None:
    failing = run(STALE_ACK, failing_seed())
    assert failing.finding is not None
    found = pin(STALE_ACK, failing, points=10, runs=12)
    assert [point.prefix for point in found.points] == sorted(p.prefix for p in found.points)
    assert found.points[0].prefix == 0
    assert found.points[0].ratio < 1
    assert found.points[-1].ratio == 1
    assert found.inevitable is not None
    assert found.inevitable.time_s <= failing.finding.at_s


def test_digests_agree_between_processes_and_hash_seeds() -> None:
    result = check_determinism(FENCED.changed(policy="step"), [1, 2])
    assert result.differences == []
    assert result.runs == 12
    assert result.digests[1] == run(FENCED.changed(policy="step"), 1).digest


def test_a_scenario_that_depends_on_the_hash_seed_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "leaky.py").write_text(LEAKY)
    import sys

    sys.path.insert(0, str(tmp_path))
    try:
        result = check_determinism(Scenario("leaky"), [1])
    finally:
        sys.path.remove(str(tmp_path))
    assert len(result.differences) == 1
    assert "PYTHONHASHSEED=42" in result.differences[0]


LEAKY = """
import trio
from trinamo.sim import World

def run(choices):
    world = World(choices)
    async def main():
        for name in {"one", "two", "three", "four", "five"}:
            world.note(name)
        await trio.lowlevel.checkpoint()
    world.run(main)
"""


def test_two_traces_of_one_seed_in_one_process_that_differ_are_a_failure() -> None:
    progress = swarm(Scenario(__name__, "count_up"), [0])
    assert [key.partition(":")[0] for key in progress.failures] == ["determinism"]


_calls = 0


def count_up(choices: Choices) -> None:
    """A scenario with a memory, which none may have."""
    global _calls
    _calls += 1
    world = World(choices)

    async def main() -> None:
        world.note("count", calls=_calls)
        await trio.lowlevel.checkpoint()

    world.run(main)


def test_what_a_scenario_raises_becomes_a_finding_by_its_kind() -> None:
    def play(error: BaseException) -> str:
        async def main() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail)

        async def fail() -> None:
            raise error

        finding = run(lambda choices: World(choices).run(main), 0).finding
        assert finding is not None
        return f"{finding.invariant}: {finding.text}"

    assert play(Violation("I1", "a gap")) == "I1: a gap"
    assert play(KeyError("x")) == "error KeyError: 'x'"
    deadlock = run(lambda choices: World(choices).run(trio.sleep_forever), 0).finding
    assert deadlock is not None
    assert deadlock.invariant == "deadlock"


def test_a_scenario_without_a_world_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="made no world"):
        run(lambda _choices: None, 0)


def test_choices_serve_one_world() -> None:
    choices = SeedChoices(1)
    World(choices)
    with pytest.raises(ValueError, match="another world"):
        World(choices)


def test_a_prefix_is_kept_and_the_tail_drawn_anew() -> None:
    tails = set()
    for tail in range(20):
        choices = PrefixChoices([1, 2], tail_seed=tail)
        values = [choices.below(4, "x") for _ in range(5)]
        assert values[:2] == [1, 2]
        tails.add(tuple(values[2:]))
    assert len(tails) > 10


def test_labelled_answers_do_not_shift_when_other_decisions_come_or_go() -> None:
    choices = LabelledChoices({"a": [1, 2]})
    assert [choices.below(3, label) for label in "babba"] == [0, 1, 0, 0, 2]
    assert choices.below(3, "a") == 0


def test_a_scenario_is_plain_data() -> None:
    assert json.loads(json.dumps(STALE_ACK.parameters)) == {"fenced": False}


def test_findings_are_alike_but_for_numbers_and_long_quotations() -> None:
    def key(text: str) -> str:
        return Finding("I1", 1.5, text).key

    assert key("client1 got 'one two three four five six'\nmore") == key(
        "client22 got 'seven eight nine ten eleven, cut sh"
    )
    assert key("no note 'lease.lost'") != key("no note 'queue.take'")


def two_bugs(choices: Choices) -> None:
    """One rule, broken in two ways; the second needs fewer decisions."""
    world = World(choices, policy="fifo")

    async def main() -> None:
        first, second = choices.below(4, "a"), choices.below(4, "b")
        if first == 3 and second:
            raise Violation("I8", "a job was done twice")
        if second:
            raise Violation("I8", "a job was lost")

    world.run(main)


def test_shrinking_does_not_slip_to_another_bug_that_breaks_the_same_rule() -> None:
    scenario = Scenario(__name__, "two_bugs")
    shrunk = shrink(scenario, ReplayChoices([3, 2]))
    assert shrunk.run.finding is not None
    assert shrunk.run.finding.text == "a job was done twice"
    assert shrunk.run.values == [3, 1]


def wide(choices: Choices) -> None:
    """Many decisions of many answers, as a whole cluster takes them."""
    world = World(choices, policy="fifo")

    async def main() -> None:
        for _ in range(5000):
            choices.below(16, "jitter")

    world.run(main)


@pytest.mark.check
def test_a_bounded_search_keeps_little_of_each_run() -> None:
    tracemalloc.start()
    try:
        explore_bounded(Scenario(__name__, "wide"), max_deviations=2, runs_max=20)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Every deviation of one run kept as a tuple is about ten megabytes.
    assert peak_bytes < 8_000_000
