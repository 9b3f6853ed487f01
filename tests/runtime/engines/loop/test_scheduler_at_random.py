"""All rules of the scheduler at once, at random: nobody is lost, and every block has its owners."""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.runtime.engines.loop.scheduling import BLOCK_TOKENS, make_scheduler, make_sequence
from trinamo.runtime.engines.loop.scheduler import Scheduler, SequenceState, StepPlan, TokenSequence
from trinamo.runtime.kv.pool import block_count_for


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, grow, pause, die and finish in any order, between and during steps."""

    scheduler: Scheduler
    sequences: list[TokenSequence]
    plan: StepPlan | None
    has_prefix_cache: bool

    @initialize(
        blocks=st.integers(10, 20),
        running_max=st.integers(1, 5),
        chunk=st.integers(1, 12),
        extra=st.integers(0, 10),
        has_prefix_cache=st.booleans(),
    )
    def open(
        self, blocks: int, running_max: int, chunk: int, extra: int, has_prefix_cache: bool
    ) -> None:
        self.scheduler = make_scheduler(
            blocks,
            running_max=running_max,
            waiting_max=5,
            chunk_tokens_max=chunk,
            step_tokens_max=running_max + extra,
            has_prefix_cache=has_prefix_cache,
        )
        self.has_prefix_cache = has_prefix_cache
        self.sequences = []
        self.plan = None

    @rule(
        prompt=st.integers(1, 30),
        answer=st.integers(1, 10),
        kind=st.sampled_from(["plain", "plain", "kept", "reserved"]),
        token=st.integers(0, 1),
        tenant=st.sampled_from("aabc"),
    )
    def submit(self, prompt: int, answer: int, kind: str, token: int, tenant: str) -> None:
        sequence = make_sequence(prompt, prompt + answer, token, tenant)
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
        assert len(set(held)) == self.scheduler.pool.used_count
        if not self.has_prefix_cache:
            assert len(held) == len(set(held)), "nobody may share"
        for sequence in running:
            # A block that somebody still writes is its own: only full ones are shared.
            unfilled = sequence.block_ids[sequence.cached_tokens // BLOCK_TOKENS :]
            assert all(held.count(block_id) == 1 for block_id in unfilled)
        pool = self.scheduler.pool
        assert pool.free_count + pool.used_count == pool.block_count
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


TestSchedulerAtRandom = SchedulerMachine.TestCase
TestSchedulerAtRandom.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
