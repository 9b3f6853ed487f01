"""The steps of one engine, one after the other, and what becomes of the tokens.

KV that an engine keeps in a place of its own is copied to and from the blocks round a step, in the hop,
where the step runs: the event loop does not wait for it, and no step is under way (`staged_step`).

One task owns the loop. It plans a step, hops into a thread for it, and hands each sequence's new
tokens to its sink in a plain call. Whoever asks only submits sequences and marks them dead, without
a checkpoint. What is decided is in `scheduler.py`, how a model computes in `step.py`, what becomes
of one request's tokens in `answer.py` and `pinned.py`, what may be asked in `host.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import trio

from ...errors import EngineError, KilledError, OverloadedError, TrinamoError, UnavailableError
from ...nurseries import is_failure
from ...protocol.kv.names import BlockNames
from ...protocol.openai.generate import FinishReason
from ..generation import BlockListener, EngineStatistics
from .answer import SequenceAnswer
from .embeddings import Embeddings
from .pinned import Pinned
from .scheduler import Scheduler, SequenceState, StepPlan, TokenSequence, Work
from .step import Hop, StagesKv, StepEngine, StepItem

Asked = SequenceAnswer | Pinned
"""What was asked of a sequence: tokens for a sink, or blocks for a transfer."""

_log = logging.getLogger("trinamo.engine")


class StepLoop:
    """Runs one step engine for all sequences that were submitted and have not ended."""

    def __init__(self, engine: StepEngine, *, hop: Hop, scheduler: Scheduler) -> None:
        self._engine = engine
        self._stages = engine if isinstance(engine, StagesKv) else None
        self._listener: BlockListener | None = None
        self._is_listener_new = False
        self._hop = hop
        self._scheduler = scheduler
        self._asked: dict[TokenSequence, Asked] = {}
        """Of all sequences that have not ended."""
        self._stopped: list[SequenceAnswer] = []
        """Their requests were stopped since the last plan."""
        self._wakeup = trio.Event()
        """Set when a plan may turn out differently than the last one."""
        scheduler.pool.on_change = self._wake
        self.embeddings = Embeddings(hop, self._wake)
        self._is_closing = False
        self._breakdown: str | None = None
        self._steps = 0
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._cancellations = 0
        self._failures = 0

    def statistics(self) -> EngineStatistics:
        """The gauges and counters now."""
        scheduler = self._scheduler
        return EngineStatistics(
            running=len(scheduler.running),
            paused=sum(s.is_paused for s in (*scheduler.running, *scheduler.waiting)),
            waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.waiting_tokens,
            blocks_used=scheduler.pool.used_count,
            blocks_free=scheduler.pool.free_count,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            hit_tokens=scheduler.hit_tokens,
            sought_tokens=scheduler.sought_tokens,
            preemptions=scheduler.preemptions,
            cancellations=self._cancellations,
            failures=self._failures,
        )

    def listen_blocks(self, listener: BlockListener, names: BlockNames) -> bool:
        """Have the engine's full blocks told; see `TellsBlocks`."""
        self._scheduler.name_by(names)
        self._listener, self._is_listener_new = listener, True
        self._wakeup.set()
        return self._scheduler.has_prefix_cache

    # --- what requests do ---

    def check_open(self) -> None:
        """Raise why nothing more can be asked, if so."""
        if self._breakdown is not None:
            raise EngineError(f"the engine broke down and takes no requests: {self._breakdown}")
        if self._is_closing:
            raise UnavailableError("the engine is closing")

    def submit(self, sequence: TokenSequence) -> None:
        """Queue a new sequence, to be followed by `follow`; `OverloadedError` if the queue is full."""
        self._scheduler.submit(sequence)
        self._wakeup.set()

    def follow(self, asked: Asked) -> None:
        """Tell `asked` what becomes of its sequence, in place of whoever was told before."""
        self._asked[asked.sequence] = asked
        asked.follow_context()

    def adopt(self, answer: SequenceAnswer, first_token: int) -> None:
        """The blocks of a reserved sequence are filled: go on behind `first_token`."""
        self._scheduler.adopt(answer.sequence, first_token)
        answer.sequence.is_in_blocks_only = self._stages is not None
        self.follow(answer)
        self._take(answer, first_token)
        self._wakeup.set()

    def resume(self, sequence: TokenSequence) -> None:
        """Its sink has room again."""
        if sequence.is_paused:
            sequence.is_paused = False
            self._wakeup.set()

    def leave(self, asked: Asked) -> None:
        """Nobody waits for it any more, whatever has become of it."""
        # No checkpoint: this also runs while being cancelled, and while a step that writes the
        # sequence's blocks is running. The loop frees them after it.
        asked.forget_context()
        if asked.sequence.is_held:
            self._end(asked)
        else:
            self._cancel(asked)
        if isinstance(asked, Pinned):
            self._scheduler.end(asked.sequence)
            self._wakeup.set()

    def end_early(self, asked: Asked) -> None:
        """Its request was stopped, so it ends before the next step, or killed: it gets no token more."""
        if isinstance(asked, Pinned):
            self._cancel(asked, KilledError("the request was stopped"))
        elif asked.is_killed:
            # Whoever waits for it is cancelled already, unless outside the context's scope.
            self._cancel(asked, KilledError("the request was killed"))
        else:
            self._stopped.append(asked)
            self._wakeup.set()

    # --- what the one task does ---

    async def run(self) -> None:
        """Step until cancelled; a step that is running when that happens is waited for."""
        while True:
            self._wakeup = trio.Event()
            stopped, self._stopped = self._stopped, []
            for answer in stopped:
                if answer.sequence in self._asked:
                    self._send(answer, answer.text.finish(), FinishReason.STOP)
                    self._cancel(answer)
            await self.embeddings.step()
            plan = self._scheduler.plan()
            for sequence in plan.unschedulable:
                self._fail(sequence, self._outgrown(sequence), None)
            for sequence in plan.pinned:
                asked = self._asked[sequence]
                assert isinstance(asked, Pinned), "it is not adopted before it is admitted"
                asked.admitted()
            try:
                token_ids = await self._compute(plan)
            except BaseException as error:
                if not is_failure(error):
                    raise
                self._fail_running(error)
                continue
            for work, token_id in zip(plan.work, token_ids, strict=True):
                self._deliver(work, token_id)
            if not (plan.work or self.embeddings.has_work):
                await self._wakeup.wait()

    async def _compute(self, plan: StepPlan) -> list[int | None]:
        """All that the engine does for one plan; what it raises means that its state is unknown."""
        for slot in plan.released_slots:
            self._engine.release(slot)
        self._tell_blocks()
        if not plan.work:
            return []
        step: Step = self._engine.step
        if self._stages is not None:
            step = staged_step(self._stages, plan.work)
        token_ids = await self._hop(step, [work.to_item() for work in plan.work])
        if len(token_ids) != len(plan.work):
            raise ValueError(f"{len(token_ids)} tokens for {len(plan.work)} sequences")
        self._steps += 1
        return token_ids

    def _tell_blocks(self) -> None:
        """Between two steps: what became of stored blocks since the last time."""
        pool = self._scheduler.pool
        events = pool.take_events()
        if self._listener is None:
            return
        if self._is_listener_new:
            self._is_listener_new = False
            events = pool.stored()
        if events:
            self._listener(events)

    def _wake(self) -> None:
        self._wakeup.set()

    def _outgrown(self, sequence: TokenSequence) -> OverloadedError:
        pool = self._scheduler.pool
        return OverloadedError(
            f"{pool.quarantined_count} of {pool.block_count} KV blocks are lost to transfers"
            " that could not be stopped; what is left does not hold this sequence",
            bound="kv_blocks",
            value=pool.usable_count,
            definite=len(sequence.token_ids) == sequence.prompt_tokens,
        )

    def _deliver(self, work: Work, token_id: int | None) -> None:
        sequence = work.sequence
        is_whole = False
        if work.token_count > 1 or sequence.cached_tokens < sequence.prompt_tokens:
            self._prompt_tokens += work.token_count
            # Where nothing but the prompt was asked for, there is no room for a token of the answer.
            is_whole = token_id is not None and sequence.is_full
            asked = self._asked.get(sequence)
            if isinstance(asked, SequenceAnswer):
                asked.computes()
        self._scheduler.advance(work, None if is_whole else token_id)
        asked = self._asked.get(sequence)
        if asked is None:
            return
        if sequence.shaping is not None and sequence.shaping.failure is not None:
            self._fail(sequence, sequence.shaping.failure, None)
            return
        if isinstance(asked, Pinned):
            asked.advanced(token_id)
        elif is_whole:
            self._send(asked, "", FinishReason.LENGTH)
            self._end(asked)
        elif token_id is not None:
            self._take(asked, token_id)

    def _take(self, answer: SequenceAnswer, token_id: int) -> None:
        """One more token of an answer."""
        sequence = answer.sequence
        self._completion_tokens += 1
        answer.unsent_ids.append(token_id)
        is_end = token_id in self._engine.end_token_ids
        if sequence.ends is not None:
            is_end = is_end or token_id in sequence.ends.stop_ids
        shaping = sequence.shaping
        if shaping is not None and shaping.told is not None:
            if not is_end:
                answer.unsent_logprobs.append(shaping.told)
            shaping.told = None
        try:
            text = "" if is_end else answer.text.push(self._engine.token_bytes(token_id))
        except BaseException as error:
            if not is_failure(error):
                raise
            reason = f"token {token_id} has no text: {type(error).__name__}: {error}"
            self._fail(sequence, EngineError(reason), error)
            return
        is_stop = is_end or answer.text.is_stopped
        if is_stop or sequence.is_full:
            text += answer.text.finish()
            self._send(answer, text, FinishReason.STOP if is_stop else FinishReason.LENGTH)
            self._end(answer)
        elif text:
            self._send(answer, text, None)

    def _send(self, answer: SequenceAnswer, text: str, reason: FinishReason | None) -> None:
        try:
            answer.send(text, reason)
        except Exception as error:  # noqa: BLE001 -- whatever a sink raises ends its own answer only
            self._cancel(answer, error)

    def _cancel(self, asked: Asked, error: Exception | None = None) -> None:
        """End what has not ended by itself."""
        if asked.sequence in self._asked:
            self._cancellations += 1
            self._end(asked, error)

    def _end(self, asked: Asked, error: Exception | None = None) -> None:
        """No token more. Idempotent."""
        if self._asked.pop(asked.sequence, None) is not None:
            if isinstance(asked, Pinned) and asked.sequence.state is SequenceState.RUNNING:
                # Whoever is about to lease its blocks for a transfer may not have heard of it, and
                # must not touch another's: they stay its own until it is left.
                asked.sequence.is_held = True
            else:
                self._scheduler.end(asked.sequence)
            self._wakeup.set()
            asked.finish(error)

    def _fail_running(self, error: BaseException) -> None:
        reason = f"a step failed with {type(error).__name__}: {error}"
        _log.error("%s; the engine forgets its %d sequences", reason, len(self._scheduler.running))
        for sequence in self._scheduler.running:
            self._fail(sequence, EngineError(reason), error)
        # What it wrote before it failed, nobody knows.
        self._scheduler.pool.forget_prefixes()
        try:
            self._engine.recover()
        except BaseException as fatal:
            if not is_failure(fatal):
                raise
            self._breakdown = f"{reason}; recovering failed with {type(fatal).__name__}: {fatal}"
            for sequence in tuple(self._asked):
                self._fail(sequence, EngineError(self._breakdown), fatal)

    def _fail(
        self, sequence: TokenSequence, failure: TrinamoError, cause: BaseException | None
    ) -> None:
        asked = self._asked.get(sequence)
        if asked is not None:
            failure.__cause__ = cause
            self._failures += 1
            self._end(asked, failure)

    def close(self) -> None:
        """Refuse new requests, end those in flight with `UnavailableError`, interrupt the step."""
        self._is_closing = True
        for asked in tuple(self._asked.values()):
            self._cancel(asked, UnavailableError("the engine is closing", definite=False))
        self.embeddings.close(UnavailableError("the engine is closing", definite=False))
        self._engine.interrupt()


Step = Callable[[Sequence[StepItem]], list[int | None]]
_Copy = tuple[int, int, Sequence[int]]
"""Slot, tokens and block ids."""


def staged_step(engine: StagesKv, work: Sequence[Work]) -> Step:
    """The step of `engine` with what has to be copied before and after it.

    Before: the KV of sequences that were adopted and take part for the first time. After: that of
    prompts which a transfer is waiting for, once they are computed to their end.
    """
    loads: list[_Copy] = []
    saves: list[_Copy] = []
    for each in work:
        sequence = each.sequence
        if sequence.is_in_blocks_only:
            sequence.is_in_blocks_only = False
            loads.append((sequence.slot, sequence.cached_tokens, tuple(sequence.block_ids)))
        if sequence.is_pinned and each.is_sampled:
            saves.append((sequence.slot, len(sequence.token_ids), tuple(sequence.block_ids)))

    def step(items: Sequence[StepItem]) -> list[int | None]:
        for load in loads:
            engine.load(*load)
        token_ids = engine.step(items)
        for save in saves:
            engine.save(*save)
        return token_ids

    return step if loads or saves else engine.step
