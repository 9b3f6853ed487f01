"""The step loop: runs one step engine for many requests at once.

One task owns the loop. It plans a step, hops into a thread for it, and hands each sequence's new
tokens to its sink (`runtime/sinks.py`) in a plain call; requests only submit sequences and mark them
dead, without a checkpoint. What is decided is in `scheduler.py`, how a model computes in `step.py`,
what becomes of one request's tokens in `answer.py`. The simulator replaces the hop.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import trio

from ...context import Context
from ...env import Env, RealEnv
from ...errors import (
    EngineError,
    KilledError,
    OverloadedError,
    TrinamoError,
    UnavailableError,
)
from ...kv.cache import KvCache
from ...kv.pool import BlockPool
from ...nurseries import open_nursery
from ...protocol.openai.generate import Delta, FinishReason, GenerateRequest
from ...sinks import Ending, Iteration, Sink
from ..generation import BlockListener, EngineInfo, EngineStatistics
from ..text import TextStream
from ..validation import check_prompt_fits, check_request
from .answer import Answer, Finish
from .hop import thread_hop
from .scheduler import Plan, Scheduler, Work
from .sequence import TokenSequence
from .step import CachesBlocks, Hop, KeepsKv, Sampling, StepEngine

__all__ = ["EngineHost", "open_engine_host"]

SEED_BITS = 64
_log = logging.getLogger("trinamo.engine")


class EngineHost:
    """A `GenerationEngine` over one step engine; made by `open_engine_host`."""

    def __init__(
        self,
        engine: StepEngine,
        *,
        env: Env,
        hop: Hop,
        scheduler: Scheduler,
        queued_deltas_max: int,
    ) -> None:
        self._engine = engine
        self._cache = engine if isinstance(engine, CachesBlocks) else None
        self._listener: BlockListener | None = None
        self._is_listener_new = False
        self._env = env
        self._hop = hop
        self._scheduler = scheduler
        self._queued_deltas_max = queued_deltas_max
        self._answers: dict[TokenSequence, Answer] = {}
        """Of all sequences that have not ended."""
        self._stopped: list[Answer] = []
        """Their requests were stopped since the last plan."""
        self._wakeup = trio.Event()
        """Set when a plan may turn out differently than the last one."""
        scheduler.pool.on_change = self._wake
        self._is_closing = False
        self._breakdown: str | None = None
        self._steps = 0
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._cancellations = 0
        self._failures = 0

    @property
    def info(self) -> EngineInfo:
        """The step engine's."""
        return self._engine.info

    def statistics(self) -> EngineStatistics:
        """The gauges and counters now."""
        scheduler = self._scheduler
        return EngineStatistics(
            running=len(scheduler.running),
            paused=sum(s.is_paused for s in (*scheduler.running, *scheduler.waiting)),
            waiting=len(scheduler.waiting),
            blocks_used=scheduler.pool.used_count,
            blocks_free=scheduler.pool.free_count,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            preemptions=scheduler.preemptions,
            cancellations=self._cancellations,
            failures=self._failures,
        )

    def listen_blocks(self, listener: BlockListener) -> bool:
        """Have the engine's full blocks told; see `TellsBlocks`."""
        self._listener, self._is_listener_new = listener, True
        self._wakeup.set()
        return self._cache is not None

    @property
    def kv(self) -> KvCache | None:
        """The engine's blocks, for transfers; None if their bytes cannot leave it."""
        if not isinstance(self._engine, KeepsKv):
            return None
        return KvCache(
            memory=self._engine.memory,
            pool=self._scheduler.pool,
            fingerprint=self.info.kv_fingerprint,
        )

    async def forward(self, request: GenerateRequest, context: Context, sink: Sink[Delta]) -> None:
        """Push one answer; see `ForwardsDeltas.forward`. `sink` is called by the step loop."""
        ending = Ending()
        answer = self._submit(request, context, sink, ending.reach)
        try:
            await ending.wait()
        finally:
            self._leave(answer)

    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[Delta, None]:
        """Stream one answer; see `GenerationEngine.generate`."""
        deltas = Iteration[Delta](self._queued_deltas_max)
        answer = self._submit(request, context, deltas, deltas.finish)
        try:
            async for delta in deltas:
                yield delta
        finally:
            self._leave(answer)

    def _submit(
        self,
        request: GenerateRequest,
        context: Context,
        sink: Sink[Delta],
        finish: Finish,
    ) -> Answer:
        self._check_open()
        check_request(request)
        token_ids = self._engine.encode(request)
        prompt_tokens = len(token_ids)
        context_tokens_max = self.info.context_tokens_max
        check_prompt_fits(prompt_tokens, context_tokens_max)
        wanted = context_tokens_max if request.max_tokens is None else request.max_tokens
        seed = self._env.rng.getrandbits(SEED_BITS) if request.seed is None else request.seed
        sequence = TokenSequence(
            token_ids=token_ids,
            prompt_tokens=prompt_tokens,
            tokens_max=min(prompt_tokens + wanted, context_tokens_max),
            sampling=Sampling(
                temperature=request.temperature,
                top_p=request.top_p,
                seed=seed % (1 << SEED_BITS),
            ),
        )
        sink.starts(partial(self._resume, sequence))
        self._scheduler.submit(sequence)
        answer = Answer(sequence, TextStream(request.stop), sink, finish, context, self._stop)
        self._answers[sequence] = answer
        answer.follow_context()
        self._wakeup.set()
        return answer

    def _resume(self, sequence: TokenSequence) -> None:
        """Its sink has room again."""
        if sequence.is_paused:
            sequence.is_paused = False
            self._wakeup.set()

    def _leave(self, answer: Answer) -> None:
        # No checkpoint: this also runs while being cancelled, and while a step that writes the
        # sequence's blocks is running. The loop frees them after it.
        answer.forget_context()
        self._cancel(answer)

    def _stop(self, answer: Answer) -> None:
        """Its request was stopped: it ends before the next step. Killed, it gets no token more."""
        if answer.is_killed:
            # Whoever waits for it is cancelled already, unless outside the context's scope.
            self._cancel(answer, KilledError("the request was killed"))
        else:
            self._stopped.append(answer)
            self._wakeup.set()

    def _check_open(self) -> None:
        if self._breakdown is not None:
            raise EngineError(f"the engine broke down and takes no requests: {self._breakdown}")
        if self._is_closing:
            raise UnavailableError("the engine is closing")

    async def run(self) -> None:
        """Step until cancelled; a step that is running when that happens is waited for."""
        while True:
            self._wakeup = trio.Event()
            self._end_stopped()
            self._end_hopeless()
            plan = self._scheduler.plan()
            try:
                token_ids = await self._compute(plan)
            except Exception as error:  # noqa: BLE001 -- whatever a model raises is its failure
                self._fail_running(error)
                continue
            for work, token_id in zip(plan.work, token_ids, strict=True):
                self._deliver(work, token_id)
            # The plan itself may have found that the last one running has outgrown the pool.
            if not plan.work and not self._scheduler.hopeless():
                await self._wakeup.wait()

    async def _compute(self, plan: Plan) -> list[int | None]:
        """All that the engine does for one plan; what it raises means that its state is unknown."""
        for slot in plan.released_slots:
            self._engine.release(slot)
        self._tell_blocks()
        if not plan.work:
            return []
        token_ids = await self._hop(self._engine.step, [work.to_item() for work in plan.work])
        if len(token_ids) != len(plan.work):
            raise ValueError(f"{len(token_ids)} tokens for {len(plan.work)} sequences")
        self._steps += 1
        return token_ids

    def _tell_blocks(self) -> None:
        """Between two steps: what the last one, and the releases after it, did to full blocks."""
        if self._cache is None:
            return
        events = self._cache.take_block_events()
        if self._listener is None:
            return
        if self._is_listener_new:
            self._is_listener_new = False
            events = self._cache.held_blocks()
        if events:
            self._listener(events)

    def _end_stopped(self) -> None:
        stopped, self._stopped = self._stopped, []
        for answer in stopped:
            if answer.sequence in self._answers:
                self._send(answer, answer.text.finish(), FinishReason.CANCELLED)
                self._cancel(answer)

    def _wake(self) -> None:
        self._wakeup.set()

    def _end_hopeless(self) -> None:
        pool = self._scheduler.pool
        for sequence in self._scheduler.hopeless():
            failure = OverloadedError(
                f"{pool.quarantined_count} of {pool.block_count} KV blocks are lost to transfers"
                " that could not be stopped; what is left does not hold this sequence",
                bound="kv_blocks",
                value=pool.usable_count,
                definite=len(sequence.token_ids) == sequence.prompt_tokens,
            )
            self._fail(sequence, failure, None)

    def _deliver(self, work: Work, token_id: int | None) -> None:
        sequence = work.sequence
        if work.token_count > 1 or sequence.cached_tokens < sequence.prompt_tokens:
            self._prompt_tokens += work.token_count
        self._scheduler.advance(work, token_id)
        if token_id is None or sequence.is_dead:
            return
        self._completion_tokens += 1
        answer = self._answers[sequence]
        answer.unsent_ids.append(token_id)
        is_end = token_id in self._engine.end_token_ids
        try:
            text = "" if is_end else answer.text.push(self._engine.token_bytes(token_id))
        except Exception as error:  # noqa: BLE001 -- whatever a model raises is its failure
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

    def _send(self, answer: Answer, text: str, reason: FinishReason | None) -> None:
        try:
            answer.send(text, reason)
        except Exception as error:  # noqa: BLE001 -- whatever a sink raises ends its own answer only
            self._cancel(answer, error)

    def _cancel(self, answer: Answer, error: Exception | None = None) -> None:
        """End what has not ended by itself."""
        if answer.sequence in self._answers:
            self._cancellations += 1
            self._end(answer, error)

    def _end(self, answer: Answer, error: Exception | None = None) -> None:
        """No token more. Idempotent."""
        if self._answers.pop(answer.sequence, None) is not None:
            self._scheduler.end(answer.sequence)
            self._wakeup.set()
            answer.finish(error)

    def _fail_running(self, error: Exception) -> None:
        reason = f"a step failed with {type(error).__name__}: {error}"
        _log.error("%s; the engine forgets its %d sequences", reason, len(self._scheduler.running))
        for sequence in self._scheduler.running:
            self._fail(sequence, EngineError(reason), error)
        try:
            self._engine.recover()
        except Exception as fatal:  # noqa: BLE001 -- whatever a model raises is its failure
            self._breakdown = f"{reason}; recovering failed with {type(fatal).__name__}: {fatal}"
            for sequence in tuple(self._answers):
                self._fail(sequence, EngineError(self._breakdown), fatal)

    def _fail(
        self, sequence: TokenSequence, failure: TrinamoError, cause: Exception | None
    ) -> None:
        answer = self._answers.get(sequence)
        if answer is not None:
            failure.__cause__ = cause
            self._failures += 1
            self._end(answer, failure)

    def close(self) -> None:
        """Refuse new requests, end those in flight with `UnavailableError`, interrupt the step."""
        self._is_closing = True
        for answer in tuple(self._answers.values()):
            self._cancel(answer, UnavailableError("the engine is closing", definite=False))
        self._engine.interrupt()


@asynccontextmanager
async def open_engine_host(
    engine: StepEngine,
    *,
    env: Env | None = None,
    hop: Hop | None = None,
    running_max: int = 64,
    waiting_max: int = 1024,
    step_tokens_max: int = 256,
    chunk_tokens_max: int = 128,
    queued_deltas_max: int = 256,
) -> AsyncIterator[EngineHost]:
    """Run `engine` until the block is left, then close it.

    A step takes at most `step_tokens_max` tokens, of one prompt `chunk_tokens_max`: a cancellation
    waits for one step at most. `running_max` sequences share the steps, `waiting_max` more wait,
    and a consumer of `generate` that is `queued_deltas_max` deltas behind pauses its own sequence;
    of `forward`, one whose sink has no room.

    Bounds that cannot work are a `ValueError`. Leaving ends the answers in flight with
    `UnavailableError`, and waits for a step in progress, which the engine is asked to cut short.
    """
    try:
        host = EngineHost(
            engine,
            env=env or RealEnv(),
            hop=hop or thread_hop(),
            scheduler=_scheduler(
                engine.info,
                running_max=running_max,
                waiting_max=waiting_max,
                step_tokens_max=step_tokens_max,
                chunk_tokens_max=chunk_tokens_max,
            ),
            queued_deltas_max=queued_deltas_max,
        )
        async with open_nursery() as nursery:
            nursery.start_soon(host.run)
            try:
                yield host
            finally:
                host.close()
                nursery.cancel_scope.cancel()
    finally:
        engine.close()


def _scheduler(info: EngineInfo, **bounds: int) -> Scheduler:
    info.check_context_fits()
    return Scheduler(BlockPool(info.block_count), block_tokens=info.block_tokens, **bounds)
