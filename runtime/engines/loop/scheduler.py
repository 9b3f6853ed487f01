"""Who takes part in the next step: admission, chunked prefill, preemption, and freeing.

What moves about is a `TokenSequence`; its text, sink and context belong to `answer.py`. Sans-IO and
synchronous: `plan()` decides one step, `advance()` records what came of it, and
between the two nothing here changes hands, so blocks that a running step reads or writes are
never given to anyone else. `steps.py` is the driver.

The rules:

* Everyone running decodes in every step; what is left of the token budget goes to prompts, in
  chunks: to one sequence of each tenant in turn, and of one tenant in order of admission.
* A waiting sequence is admitted when a slot is free and the blocks for all its known tokens and
  one more are. The tenant with the fewest running sequences is next, and of one tenant the first
  that came. A slow consumer's sequence is passed over.
* When blocks run out a victim loses all of its own and goes to the front of the queue, to be
  computed again: the newest paused sequence, else the newest of the tenant that runs most. A
  paused one also yields to a waiting one that can run, so that a consumer who reads nothing holds
  nothing for ever. So does one of a tenant that runs at least two more than the waiting one's:
  fewer, and the two would take places from each other in turn.
* A sequence begins behind the blocks that hold its prefix already, but computes its last token
  itself, whose step yields the next one, and all of them if something is told of each or its request
  wants it. Full blocks are stored for others as they are filled. So a
  preempted sequence finds what nobody else needed meanwhile.
* A pinned sequence is never a victim: a transfer may touch its blocks. It never needs more of them
  than it is admitted with, so whoever waits for blocks waits for its end at most.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Sequence

import attrs
import msgspec

from ...errors import OverloadedError
from ...kv.pool import BlockPool, block_count_for
from ...protocol.kv.names import BlockNames
from .step import Ends, KeepsPrefixes, Sampling, Shaping, StepItem


class SequenceState(enum.Enum):
    """Where a sequence is; pausing and dying are flags beside it."""

    WAITING = "waiting"
    """In the queue, without blocks: new, or preempted."""
    RUNNING = "running"
    """Holds a slot and the blocks of all its known tokens."""
    GONE = "gone"
    """Holds nothing and never comes back."""


@attrs.define(eq=False, kw_only=True)
class TokenSequence:
    """Prompt and answer so far. Compared by identity."""

    token_ids: list[int]
    """Every known token: the prompt, then what was generated."""
    prompt_tokens: int
    tokens_max: int
    """Length at which the answer ends, the prompt included."""
    sampling: Sampling = attrs.Factory(Sampling)
    shaping: Shaping | None = None
    ends: Ends | None = None
    state: SequenceState = SequenceState.WAITING
    is_whole: bool = False
    """Its prompt is computed whole, whatever others have left of it."""
    tenant: str = ""
    """Whose it is: nothing that it computes is found by others, and places go to tenants in turn."""
    found_tokens: int | None = None
    """Of its prompt, how many were held already when it was first given a place."""
    cached_tokens: int = 0
    """The KV of so many leading tokens is in the blocks."""
    block_ids: list[int] = attrs.Factory(list)
    block_hashes: list[bytes] = attrs.Factory(list)
    """Of its first full blocks, as far as anybody has asked; they stay true when it is preempted."""
    stored_blocks: int = 0
    """So many of its first blocks others can find, or do not need to."""
    slot: int = -1
    """-1 unless running."""
    is_paused: bool = False
    """Its consumer is too slow: left out of the steps, and the first victim of a preemption."""
    is_pinned: bool = False
    """A transfer may touch its blocks: it is never preempted."""
    is_held: bool = False
    """Pinned and left out of the steps: its prompt is complete, or computed by somebody else."""
    is_in_blocks_only: bool = False
    """Adopted, and not yet where an engine that stages its KV computes with it."""
    is_dead: bool = False
    """Nobody wants another token: it is gone before the next step."""

    @property
    def pending_tokens(self) -> int:
        """Known tokens whose KV is still to be computed; 1 while decoding."""
        return len(self.token_ids) - self.cached_tokens

    @property
    def needs_all(self) -> bool:
        """Nothing that was computed before is of use to it: it tells of every token, or is whole."""
        return self.is_whole or (self.shaping is not None and self.shaping.tells_prompt)

    @property
    def is_full(self) -> bool:
        """It has all the tokens it may have."""
        return len(self.token_ids) >= self.tokens_max


class Work(msgspec.Struct, eq=False, gc=False):
    """One sequence's share of a step: its next `token_count` tokens. There is one for every token."""

    sequence: TokenSequence
    token_count: int

    @property
    def is_sampled(self) -> bool:
        """Whether these are the last known tokens, so that a new one follows."""
        return self.token_count == self.sequence.pending_tokens

    def to_item(self) -> StepItem:
        """What the model is told of it."""
        sequence, count = self.sequence, self.token_count
        known, position = sequence.token_ids, sequence.cached_tokens
        end = position + count
        return StepItem(
            slot=sequence.slot,
            token_ids=known[position:end],
            position=position,
            block_ids=sequence.block_ids,
            is_sampled=end == len(known),
            sampling=sequence.sampling,
            shaping=sequence.shaping,
            barred=() if sequence.ends is None else sequence.ends.barred(end),
        )


@attrs.frozen
class StepPlan:
    """One step. The slots were released while planning and may already have new owners."""

    work: list[Work]
    released_slots: list[int]
    pinned: list[TokenSequence]
    """Those admitted just now that a transfer reads or fills."""
    unschedulable: list[TokenSequence]
    """Those waiting that could not run even alone, because too many blocks are quarantined."""


class Scheduler:
    """Decides the steps of one engine.

    `step_tokens_max` bounds the tokens of one step, `chunk_tokens_max` those of one sequence in
    it, `running_max` the sequences that hold a slot, `waiting_max` the queue.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_tokens: int,
        running_max: int,
        waiting_max: int,
        step_tokens_max: int,
        chunk_tokens_max: int,
        has_prefix_cache: bool = False,
        engine_prefixes: KeepsPrefixes | None = None,
    ) -> None:
        if min(block_tokens, running_max, waiting_max, chunk_tokens_max) < 1:
            raise ValueError("every bound of the scheduler must be at least 1")
        if step_tokens_max < running_max:
            raise ValueError(
                f"step_tokens_max ({step_tokens_max}) must be at least running_max"
                f" ({running_max}), so that every running sequence can decode in every step"
            )
        self.pool = pool
        self.running: list[TokenSequence] = []
        """In order of admission, paused ones included."""
        self.waiting: deque[TokenSequence] = deque()
        """In order of arrival, whoever they belong to; those preempted first."""
        self.preemptions = 0
        self.hit_tokens = 0
        """Tokens that sequences found in blocks as they were given a place."""
        self.sought_tokens = 0
        """All tokens that they had then."""
        self._block_tokens = block_tokens
        self._running_max = running_max
        self._waiting_max = waiting_max
        self._step_tokens_max = step_tokens_max
        self._chunk_tokens_max = chunk_tokens_max
        self.has_prefix_cache = has_prefix_cache
        """Whether blocks are kept for later sequences."""
        self._engine_prefixes = engine_prefixes
        self._names = BlockNames()
        self._turns: list[str] = []
        """Tenants whose prompts wait or are computed, the one that was given nothing longest first."""
        self._gave_way: set[str] = set()
        """Tenants of those preempted by this plan."""
        self._dead: list[TokenSequence] = []
        # Popped from the end: the lowest slot first.
        self._free_slots = list(range(running_max - 1, -1, -1))
        self._released_slots: list[int] = []
        self._admitted_pinned: list[TokenSequence] = []

    @property
    def waiting_tokens(self) -> int:
        """Known tokens that are to be computed here before their sequences decode."""
        prefills = (s for s in self.running if s.pending_tokens > 1)
        return sum(s.pending_tokens for s in (*self.waiting, *prefills) if not s.is_held)

    def submit(self, sequence: TokenSequence) -> None:
        """Put a new sequence at the end of the queue; `OverloadedError` if it is full.

        Its `tokens_max` must fit into the whole pool, else it could never end.
        """
        assert block_count_for(sequence.tokens_max, self._block_tokens) <= self.pool.block_count
        if len(self.waiting) >= self._waiting_max:
            raise OverloadedError(
                f"worker.waiting_max {self._waiting_max} requests are waiting already",
                bound="waiting_max",
                value=self._waiting_max,
            )
        self.waiting.append(sequence)

    def end(self, sequence: TokenSequence) -> None:
        """Mark a sequence dead; the next `plan()` frees what it holds. Idempotent."""
        if not sequence.is_dead:
            sequence.is_dead = True
            self._dead.append(sequence)

    def plan(self) -> StepPlan:
        """Free what the dead hold, then decide the next step; no work means nobody can run."""
        self._reap()
        work: list[Work] = []
        prompts: dict[str, deque[TokenSequence]] = {}
        self._gave_way.clear()
        budget = self._decode(work, prompts, self._step_tokens_max)
        self._share(work, prompts, budget)
        if self._gave_way:
            # None of them is back: their tenants are admitted nothing by this plan.
            work = [each for each in work if each.sequence.state is SequenceState.RUNNING]
        released, self._released_slots = self._released_slots, []
        pinned, self._admitted_pinned = self._admitted_pinned, []
        return StepPlan(work, released, pinned, self._unschedulable())

    def _unschedulable(self) -> list[TokenSequence]:
        if not (self.waiting and self.pool.quarantined_count):
            return []
        usable = self.pool.usable_count
        return [
            sequence
            for sequence in self.waiting
            if block_count_for(len(sequence.token_ids) + 1, self._block_tokens) > usable
        ]

    def advance(self, work: Work, token_id: int | None) -> None:
        """The step has computed `work`; `token_id` is the token sampled after it, if one was."""
        sequence = work.sequence
        if sequence.is_dead:
            return
        cached = sequence.cached_tokens = sequence.cached_tokens + work.token_count
        if cached // self._block_tokens > sequence.stored_blocks:
            self._store(sequence)
        if token_id is not None:
            known = sequence.token_ids
            assert cached == len(known), "a token was sampled in the middle of a prefill"
            known.append(token_id)
            # Of a prefill that is kept no more than that is wanted.
            sequence.is_held = sequence.is_pinned

    def adopt(self, sequence: TokenSequence, token_id: int) -> None:
        """The KV of all known tokens is in the blocks: decode behind `token_id` from now on."""
        assert sequence.is_held, "it is not reserved"
        assert sequence.state is SequenceState.RUNNING, "it has no blocks yet"
        sequence.cached_tokens = len(sequence.token_ids)
        sequence.is_pinned = sequence.is_held = False
        self._store(sequence)
        sequence.token_ids.append(token_id)

    def _reap(self) -> None:
        for sequence in self._dead:
            if sequence.state is SequenceState.RUNNING:
                self.running.remove(sequence)
                self._take_away(sequence)
            else:
                self.waiting.remove(sequence)
            sequence.state = SequenceState.GONE
        self._dead.clear()

    def _decode(
        self, work: list[Work], prompts: dict[str, deque[TokenSequence]], budget: int
    ) -> int:
        """Give those that decode their token, and sort the others into `prompts`, by tenant.

        Returns the budget that is left.
        """
        decoding: list[TokenSequence] = []
        for sequence in self.running:
            if not (sequence.is_paused or sequence.is_held):
                if len(sequence.token_ids) - sequence.cached_tokens == 1:
                    decoding.append(sequence)
                else:
                    prompts.setdefault(sequence.tenant, deque()).append(sequence)
        block_tokens = self._block_tokens
        for sequence in decoding:
            if budget == 0:
                return 0
            # Only decoding needs new blocks: a prompt has its own from when it is admitted.
            has_room = len(sequence.token_ids) <= len(sequence.block_ids) * block_tokens
            if has_room or self._reserve(sequence):
                work.append(Work(sequence, 1))
                budget -= 1
        return budget

    def _share(
        self, work: list[Work], prompts: dict[str, deque[TokenSequence]], budget: int
    ) -> None:
        """Give what decoding leaves to prompts: each tenant in turn has one computed, or admitted.

        Those of its prompts that run are computed before others of it are admitted.
        """
        if not (budget and (prompts or self.waiting)):
            return
        waiting = self._waiting_by_tenant()
        turns = dict.fromkeys([*self._turns, *prompts, *waiting])
        self._turns = [each for each in turns if each in prompts or each in waiting]
        running = Counter(sequence.tenant for sequence in self.running)
        # Else the chunk of one tenant may be all that a step computes, and the others wait for the next.
        part = max(1, budget // len(self._turns)) if self._turns else 0
        while budget and (prompts or waiting):
            tenant = next(each for each in self._turns if each in prompts or each in waiting)
            queues = prompts
            if tenant not in prompts:
                # Else this one would take the last free slot, and lose it in the next plan.
                queues = waiting
                tenant = min(filter(waiting.__contains__, self._turns), key=running.__getitem__)
            sequence = queues[tenant].popleft()
            if not queues[tenant]:
                del queues[tenant]
            if queues is waiting and not self._admit(sequence, running, waiting):
                # Nobody overtakes it, or it would wait for ever.
                waiting.clear()
                continue
            self._turns.remove(tenant)
            self._turns.append(tenant)
            if sequence.state is SequenceState.RUNNING and not sequence.is_held:
                budget -= self._add_work(work, sequence, min(budget, part))
        # Of a part there is no need where a prompt is short, or its sequence finds no place: the others get it.
        for each in work:
            if budget == 0:
                break
            if each.sequence.state is SequenceState.RUNNING:
                whole = min(each.sequence.pending_tokens, self._chunk_tokens_max)
                more = min(whole - each.token_count, budget)
                each.token_count += more
                budget -= more

    def _waiting_by_tenant(self) -> dict[str, deque[TokenSequence]]:
        """Those that may be admitted, in order of arrival."""
        found: dict[str, deque[TokenSequence]] = {}
        for sequence in self.waiting:
            # Whoever was preempted just now would only be the first to come back, and go again.
            if not sequence.is_paused and sequence.tenant not in self._gave_way:
                found.setdefault(sequence.tenant, deque()).append(sequence)
        return found

    def _add_work(self, work: list[Work], sequence: TokenSequence, budget: int) -> int:
        count = min(sequence.pending_tokens, self._chunk_tokens_max, budget)
        work.append(Work(sequence, count))
        return count

    def _reserve(self, sequence: TokenSequence) -> bool:
        """Get the blocks for all known tokens; False if `sequence` had to give way, now or before."""
        if sequence.state is not SequenceState.RUNNING:
            return False
        missing = self._missing_blocks(sequence, len(sequence.token_ids))
        while (taken := self.pool.take(missing)) is None:
            # There is one: `sequence` itself has all the blocks it needs if it is pinned.
            running = Counter(each.tenant for each in self.running)
            newest = [each for each in reversed(self.running) if not each.is_pinned]
            victim = max(newest, key=lambda each: (each.is_paused, running[each.tenant]))
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_ids.extend(taken)
        return True

    def _admit(
        self,
        sequence: TokenSequence,
        running: Counter[str],
        waiting: dict[str, deque[TokenSequence]],
    ) -> bool:
        """Let `sequence` run if there is a place; keep the tenants' counts and queues true."""
        if not self._find_place(sequence, running):
            return False
        self.waiting.remove(sequence)
        slot = sequence.slot = self._free_slots.pop()
        if self._engine_prefixes is not None and not sequence.is_held:
            # With one token none is found.
            known = sequence.token_ids[:1] if sequence.needs_all else sequence.token_ids
            sequence.cached_tokens = self._engine_prefixes.begin(slot, known, sequence.tenant)
        self.hit_tokens += sequence.cached_tokens
        self.sought_tokens += len(sequence.token_ids)
        if sequence.found_tokens is None:
            sequence.found_tokens = min(sequence.cached_tokens, sequence.prompt_tokens)
        sequence.state = SequenceState.RUNNING
        self.running.append(sequence)
        running[sequence.tenant] += 1
        if sequence.is_pinned:
            self._admitted_pinned.append(sequence)
        for tenant in [each for each in waiting if each in self._gave_way]:
            del waiting[tenant]
        return True

    def _find_place(self, sequence: TokenSequence, running: Counter[str]) -> bool:
        """Give `sequence` its blocks, those of its prefix shared, if there are enough, and a slot.

        `running` counts those that run by tenant, and is kept true.
        """
        found: list[int] = []
        if not sequence.needs_all:
            found = self.find_prefix(sequence.token_ids, sequence.block_hashes, sequence.tenant)
        self.pool.share(found)
        sequence.block_ids = found
        if not self._make_room(sequence, running):
            self.pool.give_back(found)
            sequence.block_ids = []
            return False
        taken = self.pool.take(self._missing_blocks(sequence, len(sequence.token_ids)))
        assert taken is not None, "room was made for fewer blocks than needed"
        sequence.block_ids = found + taken
        sequence.stored_blocks = len(found)
        sequence.cached_tokens = len(found) * self._block_tokens
        return True

    def name_by(self, names: BlockNames) -> None:
        """Name full blocks so from now on, and forget those that have other names."""
        if names.mark != self._names.mark:
            self._names = names
            self.pool.forget_prefixes()
            for sequence in (*self.running, *self.waiting):
                sequence.block_hashes.clear()

    def count_cached(self, token_ids: Sequence[int], tenant: str) -> int:
        """How many leading tokens a sequence with these would not compute, were it admitted now."""
        if self._engine_prefixes is not None:
            return self._engine_prefixes.find(token_ids, tenant)
        return len(self.find_prefix(token_ids, [], tenant)) * self._block_tokens

    def find_prefix(
        self, token_ids: Sequence[int], hashes: list[bytes], tenant: str = ""
    ) -> list[int]:
        """The stored blocks that these tokens of `tenant` begin with, but not of all of them.

        `hashes` are those of the first blocks that are known already; what is found out is added.
        """
        found: list[int] = []
        if not self.has_prefix_cache:
            return found
        for index in range((len(token_ids) - 1) // self._block_tokens):
            if index == len(hashes):
                self._add_hashes(token_ids, hashes, tenant)
            block_id = self.pool.find(hashes[index])
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _add_hashes(self, token_ids: Sequence[int], hashes: list[bytes], tenant: str) -> None:
        start = len(hashes) * self._block_tokens
        parent = hashes[-1] if hashes else self._names.root(tenant)
        # To name one costs twice as much as to name one of many.
        some = token_ids[start : start + 32 * self._block_tokens]
        hashes += self._names.of_tokens(some, self._block_tokens, parent)

    def _store(self, sequence: TokenSequence) -> None:
        """Let others find the blocks that have become full."""
        if not self.has_prefix_cache:
            return
        first, end = sequence.stored_blocks, sequence.cached_tokens // self._block_tokens
        hashes, block_ids = sequence.block_hashes, sequence.block_ids
        while len(hashes) < end:
            self._add_hashes(sequence.token_ids, hashes, sequence.tenant)
        parent = hashes[first - 1] if first else b""
        own = block_ids[first:end]
        held = self.pool.store(own, hashes[first:end], parent)
        sequence.stored_blocks = end
        if held == own or sequence.is_pinned:
            return
        # Another one has computed the same meanwhile: one copy is enough.
        for index, (mine, older) in enumerate(zip(own, held, strict=True), start=first):
            if mine != older:
                self.pool.share([older])
                block_ids[index] = older
                self.pool.give_back([mine])

    def _make_room(self, sequence: TokenSequence, running: Counter[str]) -> bool:
        """A slot and blocks for `sequence`, taken from others if need be; none is taken in vain."""
        # One token more than known, or it would be the first victim of its own first token.
        blocks = self._missing_blocks(sequence, len(sequence.token_ids) + 1)
        pool, victims = self.pool, list[TokenSequence]()
        while True:
            # Blocks that others share are not free, nor are those that a transfer may touch.
            given_back = pool.count_freed(b for other in victims for b in other.block_ids)
            if pool.free_count + given_back >= blocks and (self._free_slots or victims):
                break
            victim = self._victim(sequence.tenant, victims, running)
            if victim is None:
                return False
            victims.append(victim)
        for victim in victims:
            self._preempt(victim)
            running[victim.tenant] -= 1
        return True

    def _victim(
        self, tenant: str, victims: list[TokenSequence], running: Counter[str]
    ) -> TokenSequence | None:
        """Who yields its place to a sequence of `tenant` next, after `victims`; None if none does."""
        left = running - Counter(each.tenant for each in victims)
        yielding = (
            each
            for each in reversed(self.running)
            if (each.is_paused or left[each.tenant] >= left[tenant] + 2)
            and not each.is_pinned
            and each not in victims
        )
        return max(yielding, key=lambda each: (each.is_paused, left[each.tenant]), default=None)

    def _missing_blocks(self, sequence: TokenSequence, tokens: int) -> int:
        return block_count_for(tokens, self._block_tokens) - len(sequence.block_ids)

    def _preempt(self, victim: TokenSequence) -> None:
        self.running.remove(victim)
        self._take_away(victim)
        victim.cached_tokens = victim.stored_blocks = 0
        victim.is_in_blocks_only = False
        victim.state = SequenceState.WAITING
        self.waiting.appendleft(victim)
        self.preemptions += 1
        self._gave_way.add(victim.tenant)

    def _take_away(self, sequence: TokenSequence) -> None:
        self.pool.give_back(sequence.block_ids)
        sequence.block_ids = []
        self._free_slots.append(sequence.slot)
        self._released_slots.append(sequence.slot)
        sequence.slot = -1
