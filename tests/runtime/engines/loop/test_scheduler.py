"""Who takes part in the next step: each rule of the scheduler."""

from __future__ import annotations

import pytest

from tests.runtime.engines.loop.scheduling import (
    make_scheduler,
    make_sequence,
    shares,
    step,
    submit,
)
from trinamo.runtime.engines.loop.scheduler import SequenceState
from trinamo.runtime.errors import OverloadedError


def test_a_prompt_is_computed_in_chunks_and_sampled_at_its_end() -> None:
    scheduler = make_scheduler()
    (sequence,) = submit(scheduler, 18)
    plans = [step(scheduler) for _ in range(4)]
    assert [shares(plan)[sequence] for plan in plans] == [8, 8, 2, 1]
    assert len(sequence.token_ids) == 20


def test_decoding_comes_before_prefill_and_the_budget_holds() -> None:
    scheduler = make_scheduler(step_tokens_max=10)
    a, b = submit(scheduler, 30, 3)
    assert shares(step(scheduler)) == {a: 8, b: 2}
    assert shares(step(scheduler)) == {a: 8, b: 1}
    assert shares(step(scheduler)) == {a: 8, b: 1}
    assert len(b.token_ids) == 5


def test_waiting_sequences_are_admitted_in_order_while_slots_last() -> None:
    scheduler = make_scheduler(running_max=2)
    a, b, c = submit(scheduler, 2, 2, 2)
    assert list(shares(step(scheduler))) == [a, b]
    scheduler.end(a)
    assert list(shares(step(scheduler))) == [b, c]
    assert (b.slot, c.slot) == (1, 0)


def test_a_long_prompt_that_does_not_fit_is_not_overtaken() -> None:
    scheduler = make_scheduler(blocks=10)
    _, b, c = submit(scheduler, 20, 24, 2)
    assert [s for s in (b, c) if s in shares(step(scheduler))] == []


def test_the_slots_of_the_gone_are_told_once() -> None:
    scheduler = make_scheduler()
    (a,) = submit(scheduler, 2)
    step(scheduler)
    scheduler.end(a)
    scheduler.end(a)
    assert step(scheduler).released_slots == [0]
    assert step(scheduler).released_slots == []
    assert (a.state, scheduler.pool.used_count) == (SequenceState.GONE, 0)


def test_blocks_of_the_dead_stay_taken_until_the_next_plan() -> None:
    """A step may be writing them."""
    scheduler = make_scheduler()
    (a,) = submit(scheduler, 6)
    plan = scheduler.plan()
    scheduler.end(a)
    assert scheduler.pool.used_count == 2
    scheduler.advance(plan.work[0], 1)
    assert len(a.token_ids) == 6
    scheduler.plan()
    assert scheduler.pool.used_count == 0


def test_a_waiting_sequence_that_dies_leaves_the_queue() -> None:
    scheduler = make_scheduler(running_max=1)
    _, b = submit(scheduler, 2, 2)
    step(scheduler)
    scheduler.end(b)
    step(scheduler)
    assert not scheduler.waiting
    assert b.state is SequenceState.GONE


def test_when_blocks_run_out_the_newest_is_computed_again_later() -> None:
    scheduler = make_scheduler(blocks=10)
    a, b = submit(scheduler, 14, 15)
    # 14 + 15 tokens are 8 blocks; both grow until an 11th would be needed.
    plan = step(scheduler)
    while scheduler.preemptions == 0:
        plan = step(scheduler)
    assert plan.released_slots == [1]
    assert (b.state, b.block_ids, b.cached_tokens) == (SequenceState.WAITING, [], 0)
    assert list(shares(plan)) == [a]
    assert scheduler.waiting[0] is b
    known = len(b.token_ids)
    scheduler.end(a)
    assert shares(step(scheduler)) == {b: 8}
    assert len(b.token_ids) == known


def test_a_paused_sequence_is_left_out_and_keeps_its_blocks() -> None:
    scheduler = make_scheduler()
    a, b = submit(scheduler, 2, 2)
    step(scheduler)
    a.is_paused = True
    assert list(shares(step(scheduler))) == [b]
    assert a.block_ids
    a.is_paused = False
    assert list(shares(step(scheduler))) == [a, b]


def test_a_paused_sequence_is_the_first_victim() -> None:
    scheduler = make_scheduler(blocks=10)
    a, b = submit(scheduler, 14, 15)
    while scheduler.pool.free_count:
        step(scheduler)
    a.is_paused = True
    while scheduler.preemptions == 0:
        step(scheduler)
    assert (a.state, b.state) == (SequenceState.WAITING, SequenceState.RUNNING)


@pytest.mark.parametrize("bounds", [{"running_max": 1}, {"blocks": 10}])
def test_a_paused_sequence_yields_its_place_to_one_that_can_run(bounds: dict[str, int]) -> None:
    scheduler = make_scheduler(**bounds)
    (a,) = submit(scheduler, 30)
    for _ in range(4):
        step(scheduler)
    a.is_paused = True
    (b,) = submit(scheduler, 14)
    assert list(shares(step(scheduler))) == [b]
    # It comes back when its consumer does, before those that came later.
    (c,) = submit(scheduler, 2)
    a.is_paused = False
    scheduler.end(b)
    assert next(iter(shares(step(scheduler)))) is a
    assert c.state is SequenceState.WAITING or c in scheduler.running


def test_nobody_is_preempted_in_vain() -> None:
    """A waiting sequence that would not fit anyway takes nothing from a paused one."""
    scheduler = make_scheduler(blocks=10)
    a, b = submit(scheduler, 20, 6)
    for _ in range(3):
        step(scheduler)
    b.is_paused = True
    submit(scheduler, 24)
    step(scheduler)
    assert b.state is SequenceState.RUNNING
    assert a.state is SequenceState.RUNNING


def test_a_full_queue_refuses() -> None:
    scheduler = make_scheduler(waiting_max=2)
    submit(scheduler, 1, 1)
    with pytest.raises(OverloadedError) as caught:
        submit(scheduler, 1)
    assert (caught.value.bound, caught.value.value) == ("waiting_max", 2)


def test_a_sequence_that_could_never_end_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        make_scheduler(blocks=9).submit(make_sequence(1, tokens_max=40))


@pytest.mark.parametrize("bounds", [{"step_tokens_max": 3}, {"running_max": 0}])
def test_bounds_that_cannot_work_are_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        make_scheduler(**bounds)


def test_blocks_that_a_transfer_may_touch_make_no_room() -> None:
    """A paused sequence yields its blocks, but they are not free before the transfer ends."""
    scheduler = make_scheduler(blocks=4)
    old, new = make_sequence(8, 16), make_sequence(8, 16)
    scheduler.submit(old)
    step(scheduler)
    old.is_paused = True
    scheduler.pool.lease(old.block_ids)
    scheduler.submit(new)
    assert step(scheduler).work == []
    assert old.state is SequenceState.RUNNING, "to preempt it would help nobody"
    scheduler.pool.release(old.block_ids)
    assert shares(step(scheduler)) == {new: 8}


def test_a_sequence_that_quarantine_left_no_room_for_is_unschedulable() -> None:
    scheduler = make_scheduler(blocks=4)
    short, long = make_sequence(4, 16), make_sequence(11, 16)
    scheduler.submit(short)
    lost = scheduler.pool.take(2)
    assert lost is not None
    scheduler.pool.lease(lost)
    assert step(scheduler).unschedulable == []
    scheduler.submit(long)
    scheduler.pool.quarantine(lost)
    plan = step(scheduler)
    assert plan.unschedulable == [long]
    assert shares(plan) == {short: 1}
    scheduler.end(long)
    assert step(scheduler).unschedulable == []


def test_a_pinned_sequence_is_no_victim_and_a_held_one_computes_nothing() -> None:
    scheduler = make_scheduler(blocks=10)
    growing, pinned = make_sequence(14), make_sequence(15)
    pinned.is_pinned = pinned.is_held = True
    scheduler.submit(growing)
    scheduler.submit(pinned)
    assert scheduler.plan().pinned == [pinned]
    # The newest is pinned, so the one that needs a block gives way itself.
    while growing.state is not SequenceState.WAITING:
        assert pinned not in shares(step(scheduler))
    assert pinned.state is SequenceState.RUNNING
    scheduler.adopt(pinned, 7)
    assert shares(step(scheduler))[pinned] == 1
    assert len(pinned.token_ids) == 17
    # An ordinary one by now.
    while pinned not in scheduler.waiting:
        step(scheduler)


def test_a_kept_prefill_rests_when_its_next_token_is_chosen() -> None:
    scheduler = make_scheduler()
    kept = make_sequence(6)
    kept.is_pinned = True
    scheduler.submit(kept)
    assert shares(step(scheduler)) == {kept: 6}
    assert step(scheduler).work == []
    assert (kept.cached_tokens, len(kept.token_ids), kept.is_held) == (6, 7, True)


def test_a_sequence_begins_behind_what_is_stored_but_computes_its_last_token() -> None:
    scheduler = make_scheduler(has_prefix_cache=True)
    (a,) = submit(scheduler, 8)
    assert shares(step(scheduler)) == {a: 8}
    b, c = make_sequence(8), make_sequence(6, token=1)
    scheduler.submit(b)
    scheduler.submit(c)
    # Both blocks of the prompt are stored, but the step of the last token yields the next one.
    assert shares(step(scheduler)) == {a: 1, b: 4, c: 6}
    # The second was computed once more for that, and one copy is enough.
    assert a.block_ids[:2] == b.block_ids[:2]
    assert scheduler.pool.used_count == 2 + 1 + 2
    (d,) = submit(scheduler, 9)
    assert shares(step(scheduler))[d] == 1
    scheduler.end(a)
    scheduler.end(b)
    scheduler.end(d)
    step(scheduler)
    (e,) = submit(scheduler, 9)
    assert shares(step(scheduler))[e] == 1, "nobody has it, but it is there"


def test_a_sequence_that_is_whole_begins_behind_nothing_and_stores_for_others() -> None:
    scheduler = make_scheduler(has_prefix_cache=True)
    whole = make_sequence(8)
    whole.is_whole = True
    scheduler.submit(whole)
    assert shares(step(scheduler)) == {whole: 8}
    again, other = make_sequence(8), make_sequence(8)
    again.is_whole = True
    scheduler.submit(again)
    scheduler.submit(other)
    assert shares(step(scheduler)) == {whole: 1, again: 8, other: 4}


def test_a_preempted_sequence_finds_the_blocks_that_nobody_took() -> None:
    scheduler = make_scheduler(blocks=10, has_prefix_cache=True)
    a, b = make_sequence(14), make_sequence(15, token=1)
    scheduler.submit(a)
    scheduler.submit(b)
    while scheduler.preemptions == 0:
        step(scheduler)
    assert (b.state, b.cached_tokens) == (SequenceState.WAITING, 0)
    assert len(b.token_ids) == 21
    while len(a.block_ids) < 6:
        step(scheduler)
    # It took the end of the other's prefix, as no empty block was left.
    scheduler.end(a)
    assert shares(step(scheduler)) == {b: 5}


def test_blocks_of_a_pinned_sequence_stay_where_they_are() -> None:
    """Another one computes the same meanwhile, but a transfer knows the pinned one's blocks."""
    scheduler = make_scheduler(has_prefix_cache=True)
    plain, kept = make_sequence(9), make_sequence(9)
    kept.is_pinned = True
    scheduler.submit(plain)
    scheduler.submit(kept)
    plan = scheduler.plan()
    own = list(kept.block_ids)
    for work in plan.work:
        scheduler.advance(work, None if work.sequence.pending_tokens > 8 else 1)
    assert kept.block_ids == own
    assert set(own).isdisjoint(plain.block_ids)


def test_an_adopted_sequence_stores_what_a_transfer_has_filled() -> None:
    scheduler = make_scheduler(has_prefix_cache=True)
    reserved = make_sequence(10)
    reserved.is_pinned = reserved.is_held = True
    scheduler.submit(reserved)
    scheduler.plan()
    assert scheduler.find_prefix(reserved.token_ids, []) == [], "it is not filled yet"
    scheduler.adopt(reserved, 5)
    assert scheduler.find_prefix([0] * 10, []) == reserved.block_ids[:2]
    (again,) = submit(scheduler, 10)
    assert shares(step(scheduler)) == {reserved: 1, again: 2}


def test_shared_blocks_of_a_paused_sequence_make_no_room() -> None:
    scheduler = make_scheduler(blocks=6, has_prefix_cache=True)
    a, b = make_sequence(9, 24), make_sequence(9, 24)
    for sequence in (a, b):
        scheduler.submit(sequence)
        step(scheduler)
        step(scheduler)
    assert scheduler.pool.free_count == 2
    b.is_paused = True
    # Of the paused one's three blocks the other has two, so four are not to be had.
    scheduler.submit(make_sequence(14, 24, token=1))
    step(scheduler)
    assert b.state is SequenceState.RUNNING


def test_what_is_still_to_be_computed_is_counted_but_not_what_others_fill() -> None:
    scheduler = make_scheduler(running_max=2, chunk_tokens_max=4)
    decoding, prefilling, waiting = make_sequence(3), make_sequence(9), make_sequence(5)
    for sequence in (decoding, prefilling, waiting):
        scheduler.submit(sequence)
    assert scheduler.waiting_tokens == 17
    step(scheduler)
    assert scheduler.waiting_tokens == 5 + 5
    scheduler.end(decoding)
    scheduler.end(waiting)
    while scheduler.waiting_tokens:
        step(scheduler)
    assert prefilling.pending_tokens == 1
    held = make_sequence(7)
    held.is_pinned = held.is_held = True
    scheduler.submit(held)
    assert scheduler.waiting_tokens == 0
    step(scheduler)
    assert (held.pending_tokens, scheduler.waiting_tokens) == (7, 0)
