"""Tenants that share one scheduler: none of them waits for all that another one has asked."""

from __future__ import annotations

import pytest

from tests.runtime.engines.loop.scheduling import (
    make_scheduler,
    make_sequence,
    shares,
    step,
    submit,
)
from trinamo.runtime.engines.loop.scheduler import Scheduler, SequenceState, TokenSequence


def steps_until_full(scheduler: Scheduler, sequence: TokenSequence) -> int:
    """How many steps the answer takes, in which those that are full end."""
    for count in range(1, 1000):
        step(scheduler)
        if sequence.is_full:
            return count
        for each in tuple(scheduler.running):
            if each.is_full:
                scheduler.end(each)
    raise AssertionError("it gets no tokens")


@pytest.mark.parametrize("bounds", [{}, {"blocks": 40}, {"running_max": 2}])
def test_four_tokens_beside_another_tenants_hundred_answers_take_four_steps(
    bounds: dict[str, int],
) -> None:
    """Whether slots, blocks or the budget of prompts are what the other one has taken."""
    scheduler = make_scheduler(waiting_max=200, **bounds)
    for _ in range(100):
        scheduler.submit(make_sequence(20, 120, tenant="crowd"))
    for _ in range(3):
        step(scheduler)
    for _ in range(5):
        other = make_sequence(2, 6, tenant="other")
        scheduler.submit(other)
        assert steps_until_full(scheduler, other) == 4
        scheduler.end(other)
    assert sum(each.state is SequenceState.RUNNING for each in scheduler.running) > 1


def test_prompts_of_tenants_are_computed_in_turn() -> None:
    scheduler = make_scheduler()
    a, b = submit(scheduler, 30, 30, tenant="a")
    assert shares(step(scheduler)) == {a: 8, b: 8}
    (c,) = submit(scheduler, 30, tenant="c")
    (d,) = submit(scheduler, 30, tenant="d")
    # A third each, and what that leaves to who is next in turn.
    assert [shares(step(scheduler)) for _ in range(3)] == [
        {a: 5, c: 5, d: 5, b: 1},
        {c: 5, d: 5, a: 5, b: 1},
        {c: 5, d: 5, a: 5, b: 1},
    ]


def test_a_chunk_as_long_as_a_step_leaves_room_for_another_tenants_prompt() -> None:
    scheduler = make_scheduler(chunk_tokens_max=16)
    (long,) = submit(scheduler, 38, tenant="a")
    assert shares(step(scheduler)) == {long: 16}
    (short,) = submit(scheduler, 2, tenant="b")
    # And it gets what the other one needs nothing of.
    assert shares(step(scheduler)) == {long: 14, short: 2}


def test_tenants_that_find_no_place_take_nothing_from_a_prompt() -> None:
    scheduler = make_scheduler(running_max=1, chunk_tokens_max=16)
    (long,) = submit(scheduler, 38, tenant="a")
    assert shares(step(scheduler)) == {long: 16}
    for number in range(8):
        submit(scheduler, 2, tenant=f"b{number}")
    assert shares(step(scheduler)) == {long: 16}


def test_places_go_to_tenants_in_turn_and_to_who_has_fewest() -> None:
    scheduler = make_scheduler(running_max=1)
    first, second = submit(scheduler, 2, 2, tenant="a")
    (other,) = submit(scheduler, 2, tenant="b")
    order = []
    for _ in range(3):
        (running,) = shares(step(scheduler))
        order.append(running)
        scheduler.end(running)
    assert order == [first, other, second]


def test_who_has_two_more_yields_its_newest_and_gets_it_back() -> None:
    scheduler = make_scheduler(running_max=2, has_prefix_cache=True)
    old, new = make_sequence(8, tenant="a"), make_sequence(8, token=1, tenant="a")
    scheduler.submit(old)
    scheduler.submit(new)
    step(scheduler)
    (waiting,) = submit(scheduler, 8, tenant="a")
    other, next_other = submit(scheduler, 2, 2, tenant="b")
    assert list(shares(step(scheduler))) == [old, other]
    assert list(scheduler.waiting) == [new, waiting, next_other]
    # One each: to take another one would only be the beginning of taking turns.
    assert list(shares(step(scheduler))) == [old, other]
    assert scheduler.preemptions == 1
    scheduler.end(next_other)
    scheduler.end(other)
    # It computes again what nobody has kept.
    assert shares(step(scheduler)) == {old: 1, new: 1}


def test_what_a_tenant_yields_is_taken_from_nobody_in_vain() -> None:
    """A long prompt that would not fit beside the one that stays waits for its end."""
    scheduler = make_scheduler(blocks=10)
    a, b = submit(scheduler, 12, 12, tenant="a")
    step(scheduler)
    submit(scheduler, 33, tenant="b")
    assert list(shares(step(scheduler))) == [a, b]
    assert scheduler.preemptions == 0


def test_a_growing_answer_takes_blocks_from_who_runs_most() -> None:
    """Not from the newest, which is the only one of its tenant; it may be in the plan already."""
    scheduler = make_scheduler(blocks=11)
    a, b = submit(scheduler, 12, 12, tenant="a")
    step(scheduler)
    (other,) = submit(scheduler, 8, tenant="b")
    plan = step(scheduler)
    while not scheduler.preemptions:
        plan = step(scheduler)
    assert b.state is SequenceState.WAITING
    assert list(shares(plan)) == [a, other]
