"""Who takes part in the next step: each rule of the scheduler, then all of them at random."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trinamo.runtime.engines.loop.scheduler import Plan, Scheduler
from trinamo.runtime.engines.loop.sequence import SequenceState, TokenSequence
from trinamo.runtime.errors import OverloadedError
from trinamo.runtime.kv.pool import BlockPool, block_count_for

BLOCK_TOKENS = 4


def make_scheduler(blocks: int = 100, **bounds: int) -> Scheduler:
    chosen: dict[str, Any] = {
        "running_max": 4,
        "waiting_max": 10,
        "step_tokens_max": 16,
        "chunk_tokens_max": 8,
    }
    return Scheduler(BlockPool(blocks), block_tokens=BLOCK_TOKENS, **(chosen | bounds))


def make_sequence(prompt_tokens: int, tokens_max: int = 40) -> TokenSequence:
    return TokenSequence(
        token_ids=[0] * prompt_tokens, prompt_tokens=prompt_tokens, tokens_max=tokens_max
    )


def submit(scheduler: Scheduler, *prompts: int) -> list[TokenSequence]:
    sequences = [make_sequence(prompt) for prompt in prompts]
    for sequence in sequences:
        scheduler.submit(sequence)
    return sequences


def step(scheduler: Scheduler) -> Plan:
    plan = scheduler.plan()
    for work in plan.work:
        scheduler.advance(work, 1 if work.is_sampled else None)
    return plan


def shares(plan: Plan) -> dict[TokenSequence, int]:
    return {work.sequence: work.token_count for work in plan.work}


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


def test_a_sequence_that_quarantine_left_no_room_for_is_hopeless() -> None:
    scheduler = make_scheduler(blocks=4)
    short, long = make_sequence(4, 16), make_sequence(11, 16)
    scheduler.submit(short)
    scheduler.submit(long)
    assert scheduler.hopeless() == []
    lost = scheduler.pool.take(2)
    assert lost is not None
    scheduler.pool.lease(lost)
    scheduler.pool.quarantine(lost)
    assert scheduler.hopeless() == [long]
    scheduler.end(long)
    assert scheduler.hopeless() == []
    assert shares(step(scheduler)) == {short: 4}


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


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, grow, pause, die and finish in any order, between and during steps."""

    scheduler: Scheduler
    sequences: list[TokenSequence]
    plan: Plan | None

    @initialize(
        blocks=st.integers(10, 20),
        running_max=st.integers(1, 5),
        chunk=st.integers(1, 12),
        extra=st.integers(0, 10),
    )
    def open(self, blocks: int, running_max: int, chunk: int, extra: int) -> None:
        self.scheduler = make_scheduler(
            blocks,
            running_max=running_max,
            waiting_max=5,
            chunk_tokens_max=chunk,
            step_tokens_max=running_max + extra,
        )
        self.sequences = []
        self.plan = None

    @rule(
        prompt=st.integers(1, 30),
        answer=st.integers(1, 10),
        kind=st.sampled_from(["plain", "plain", "kept", "reserved"]),
    )
    def submit(self, prompt: int, answer: int, kind: str) -> None:
        sequence = make_sequence(prompt, prompt + answer)
        sequence.is_pinned, sequence.is_held = kind != "plain", kind == "reserved"
        if len(self.scheduler.waiting) < 5:
            self.scheduler.submit(sequence)
            self.sequences.append(sequence)

    @precondition(lambda self: any(s.is_held for s in self.scheduler.running))
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        held = [s for s in self.scheduler.running if s.is_held and not s.is_dead]
        reserved = [s for s in held if len(s.token_ids) == s.prompt_tokens]
        if reserved:
            self.scheduler.adopt(data.draw(st.sampled_from(reserved)), 1)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.scheduler.end(self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1))))

    def end_now(self, sequence: TokenSequence) -> None:
        self.scheduler.end(sequence)
        self.sequences.remove(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), is_paused=st.booleans())
    def pause(self, data: st.DataObject, is_paused: bool) -> None:
        chosen = self.sequences[data.draw(st.integers(0, len(self.sequences) - 1))]
        # Nobody reads tokens of a pinned one, so nobody is too slow.
        chosen.is_paused = is_paused and not chosen.is_pinned

    @precondition(lambda self: self.plan is None)
    @rule()
    def begin_step(self) -> None:
        pinned = [s for s in self.scheduler.running if s.is_pinned and not s.is_dead]
        self.plan = self.scheduler.plan()
        assert all(s.state is SequenceState.RUNNING for s in pinned), (
            "a transfer touches its blocks"
        )
        work = self.plan.work
        # Nobody waits without a reason: someone paused or pinned holds what is missing.
        stuck = [s for s in self.scheduler.waiting if not s.is_paused]
        assert work or not stuck or any(s.is_held for s in self.scheduler.running)
        assert sum(w.token_count for w in work) <= self.scheduler._step_tokens_max
        assert len({w.sequence for w in work}) == len(work)
        for w in work:
            sequence = w.sequence
            assert sequence.state is SequenceState.RUNNING
            assert not sequence.is_paused
            assert not sequence.is_held
            assert not sequence.is_dead
            end = sequence.cached_tokens + w.token_count
            assert 0 < w.token_count <= self.scheduler._chunk_tokens_max
            assert end <= len(sequence.token_ids)
            assert len(sequence.block_ids) >= block_count_for(end, BLOCK_TOKENS)

    @precondition(lambda self: self.plan is not None)
    @rule()
    def finish_step(self) -> None:
        assert self.plan is not None
        for work in self.plan.work:
            self.scheduler.advance(work, 1 if work.is_sampled else None)
            if work.sequence.is_full and not work.sequence.is_pinned and not work.sequence.is_dead:
                self.scheduler.end(work.sequence)
                self.sequences.remove(work.sequence)
        self.plan = None

    @invariant()
    def blocks_and_slots_have_one_owner(self) -> None:
        running = self.scheduler.running
        held = [block_id for sequence in running for block_id in sequence.block_ids]
        assert len(held) == len(set(held)) == self.scheduler.pool.used_count
        slots = [sequence.slot for sequence in running]
        assert len(slots) == len(set(slots)) <= self.scheduler._running_max
        assert all(0 <= slot < self.scheduler._running_max for slot in slots)
        assert all(not sequence.block_ids for sequence in self.scheduler.waiting)

    def teardown(self) -> None:
        """Once nobody is paused any more, everyone ends, and the pool is full again."""
        if not hasattr(self, "scheduler"):
            return
        if self.plan is not None:
            self.finish_step()
        for sequence in self.sequences:
            sequence.is_paused = False
        for _ in range(3000):
            self.begin_step()
            # Whoever pinned them lets go in the end.
            for sequence in [s for s in self.sequences if s.is_held]:
                self.end_now(sequence)
            if self.plan is not None and not self.plan.work and not self.sequences:
                break
            self.finish_step()
        self.scheduler.plan()
        assert self.sequences == []
        assert self.scheduler.pool.used_count == 0
        assert not self.scheduler.running
        assert not self.scheduler.waiting


TestSchedulerAtRandom = pytest.mark.slow(SchedulerMachine.TestCase)
TestSchedulerAtRandom.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
