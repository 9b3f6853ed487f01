"""One step engine for many requests at once: what may be asked of it, and the thread of its steps.

The steps and what becomes of their tokens are in `steps.py`, who takes part in one in
`scheduler.py`, how a model computes in `step.py`. The simulator replaces the hop.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import msgspec
import outcome
import trio

from ...context import Context
from ...env import Env, RealEnv
from ...errors import OverloadedError, RequestError
from ...kv.pool import BlockPool
from ...kv.regions import KvCache
from ...nurseries import open_nursery
from ...protocol.kv.names import BlockNames
from ...protocol.openai.generate import (
    Delta,
    FinishReason,
    GenerateRequest,
    Task,
    check_features,
    is_shaped,
)
from ...sinks import Ending, Iteration, Sink
from ..generation import BlockListener, EngineInfo, EngineStatistics
from ..handoff import KeptPrefill, Prompt, Reservation
from ..prompts import check_prompt_fits
from ..text import TextStream
from .answer import Finish, SequenceAnswer
from .pinned import Pinned, Reserved
from .scheduler import Scheduler, TokenSequence
from .step import (
    TEMPERATURE_MIN,
    Embeds,
    Ends,
    Hop,
    KeepsKv,
    KeepsPrefixes,
    Prepares,
    Sampling,
    Shaping,
    StagesKv,
    StepEngine,
)
from .steps import StepLoop


class EngineHost:
    """A `GenerationEngine` over one step engine, which `HandsOver`; made by `open_engine_host`."""

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
        self._preparing = engine if isinstance(engine, Prepares) else None
        self._env = env
        self._scheduler = scheduler
        self._steps = StepLoop(engine, hop=hop, scheduler=scheduler)
        self._queued_deltas_max = queued_deltas_max

    @property
    def info(self) -> EngineInfo:
        """The step engine's."""
        return self._engine.info

    def statistics(self) -> EngineStatistics:
        """The gauges and counters now."""
        return self._steps.statistics()

    def listen_blocks(self, listener: BlockListener, names: BlockNames) -> bool:
        """Have the engine's full blocks told; see `TellsBlocks`."""
        return self._steps.listen_blocks(listener, names)

    @property
    def kv(self) -> KvCache | None:
        """The engine's blocks, for transfers; None if their bytes cannot leave it."""
        memory = self._engine.memory if isinstance(self._engine, KeepsKv) else None
        if memory is None:
            return None
        return KvCache(
            memory=memory, pool=self._scheduler.pool, fingerprint=self.info.kv_fingerprint
        )

    # --- answers ---

    async def forward(self, request: GenerateRequest, context: Context, sink: Sink[Delta]) -> None:
        """Push one answer; see `ForwardsDeltas.forward`. `sink` is called by the step loop."""
        request = await self.prepare(request)
        if request.task is not Task.GENERATE:
            sink.take([await self._done(request)])
            sink.end()
            return
        ending = Ending()
        answer = self._submit(request, context, sink, partial(_end, sink, ending))
        try:
            await ending.wait()
        finally:
            self._steps.leave(answer)

    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[Delta, None]:
        """Stream one answer; see `GenerationEngine.generate`."""
        request = await self.prepare(request)
        if request.task is not Task.GENERATE:
            yield await self._done(request)
            return
        deltas = Iteration[Delta](self._queued_deltas_max)
        answer = self._submit(request, context, deltas, deltas.finish)
        try:
            async for delta in deltas:
                yield delta
        finally:
            self._steps.leave(answer)

    async def _done(self, request: GenerateRequest) -> Delta:
        """The one delta of a task that makes no answer, and takes no place in the steps."""
        self._steps.check_open()
        engine = self._engine
        check_features(request, engine.info.features)
        token_ids = engine.encode(request)
        done = Delta("", [], FinishReason.STOP, len(token_ids))
        if request.task is Task.TOKENIZE:
            return msgspec.structs.replace(done, prompt_token_ids=token_ids)
        if request.task is Task.DETOKENIZE:
            text = b"".join(map(engine.token_bytes, token_ids)).decode("utf-8", "replace")
            return msgspec.structs.replace(done, text=text)
        assert isinstance(engine, Embeds), "its features say that it embeds"
        check_prompt_fits(len(token_ids), engine.info.context_tokens_max, request)
        return msgspec.structs.replace(done, raw=await self._steps.embeddings.of(engine, token_ids))

    def _submit(
        self, request: GenerateRequest, context: Context, sink: Sink[Delta], finish: Finish
    ) -> SequenceAnswer:
        self._steps.check_open()
        sequence = sequence_of(self._engine, request, self._env.rng)
        answer = self._answer(sequence, request, context, sink, finish)
        is_stop = answer.text.is_stopped or ends_with(self._engine, request)
        if is_stop or (sequence.is_full and request.delivered_ids):
            # All was delivered but the end.
            reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
            answer.send(answer.text.finish(), reason)
            answer.finish(None)
            return answer
        try:
            self._steps.submit(sequence)
        except OverloadedError as error:
            answer.finish(error)
            raise
        self._steps.follow(answer)
        return answer

    def _answer(
        self,
        sequence: TokenSequence,
        request: GenerateRequest,
        context: Context,
        sink: Sink[Delta],
        finish: Finish,
    ) -> SequenceAnswer:
        sink.on_room(partial(self._steps.resume, sequence))
        text = text_behind(self._engine, request)
        told = request.return_token_ids
        return SequenceAnswer(sequence, text, sink, finish, context, self._steps.end_early, told)

    # --- handing over ---

    async def prepare(self, request: GenerateRequest) -> GenerateRequest:
        """See `HandsOver.prepare`."""
        if self._preparing is None:
            return request
        check_features(request, self.info.features)
        return await self._preparing.prepare(request)

    def examine(self, request: GenerateRequest) -> Prompt:
        """See `HandsOver.examine`."""
        token_ids, prompt_tokens = known_tokens(self._engine, request)
        count_cached = self._scheduler.count_cached
        return Prompt(
            token_ids=token_ids,
            cached_tokens=request.cache_prompt and count_cached(token_ids, request.tenant),
            is_answered=is_answered(self._engine, request, prompt_tokens),
        )

    @asynccontextmanager
    async def prefill_and_keep(
        self, request: GenerateRequest, context: Context
    ) -> AsyncIterator[KeptPrefill]:
        """See `HandsOver.prefill_and_keep`."""
        request = await self.prepare(request)
        with self._pinned(request, context, is_held=False) as pinned:
            await pinned.wait_admitted()
            yield pinned

    @asynccontextmanager
    async def reserve(
        self, request: GenerateRequest, context: Context
    ) -> AsyncIterator[Reservation]:
        """See `HandsOver.reserve`."""
        request = await self.prepare(request)
        with self._pinned(request, context, is_held=True) as pinned:
            await pinned.wait_admitted()
            sequence = pinned.sequence
            prompt = Prompt(
                token_ids=tuple(sequence.token_ids), cached_tokens=sequence.cached_tokens
            )
            adopt = partial(self._adopt, pinned, request, context)
            yield Reserved(prompt, pinned.block_ids, adopt)

    @contextmanager
    def _pinned(
        self, request: GenerateRequest, context: Context, *, is_held: bool
    ) -> Iterator[Pinned]:
        assert self.kv is not None, "no other engine could read or write its blocks"
        self._steps.check_open()
        sequence = sequence_of(self._engine, request, self._env.rng)
        if is_answered(self._engine, request, sequence.prompt_tokens):
            raise RequestError("the whole answer is delivered already", param="delivered_ids")
        sequence.is_pinned, sequence.is_held = True, is_held
        is_staged = isinstance(self._engine, StagesKv)
        known = sequence, context, self.info.block_tokens, self._steps.end_early
        pinned = Pinned(*known, is_staged)
        self._steps.submit(sequence)
        self._steps.follow(pinned)
        try:
            yield pinned
        finally:
            self._steps.leave(pinned)

    async def _adopt(
        self,
        pinned: Pinned,
        request: GenerateRequest,
        context: Context,
        first_token: int,
        sink: Sink[Delta],
    ) -> None:
        pinned.check_alive()
        pinned.adopted()
        ending = Ending()
        answer = self._answer(pinned.sequence, request, context, sink, partial(_end, sink, ending))
        self._steps.adopt(answer, first_token)
        try:
            await ending.wait()
        finally:
            self._steps.leave(answer)

    # --- the loop ---

    async def run(self) -> None:
        """Step until cancelled; a step that is running when that happens is waited for."""
        await self._steps.run()

    def close(self) -> None:
        """Refuse new requests, end those in flight with `UnavailableError`, interrupt the step."""
        self._steps.close()


def _end(sink: Sink[Delta], ending: Ending, error: BaseException | None) -> None:
    """In the step that made the last token: its sink is told before the task that waits for it."""
    if error is None:
        sink.end()
    ending.reach(error)


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
    async with AsyncExitStack() as stack:
        stack.callback(engine.close)
        if hop is None:
            hop = (await stack.enter_async_context(open_step_thread())).run
        host = EngineHost(
            engine,
            env=env or RealEnv(),
            hop=hop,
            scheduler=_scheduler(
                engine,
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


def _scheduler(engine: StepEngine, **bounds: int) -> Scheduler:
    info = engine.info
    info.check_context_fits()
    own = engine if isinstance(engine, KeepsPrefixes) else None
    return Scheduler(
        BlockPool(info.block_count),
        block_tokens=info.block_tokens,
        has_prefix_cache=info.has_prefix_cache and own is None,
        engine_prefixes=own,
        **bounds,
    )


SEED_BITS = 64
PROMPT_LOGPROBS_MAX: Final = 1 << 18
"""Of one request, alternatives included: some 4 MB on the wire, ten times that in the engine."""


def known_tokens(engine: StepEngine, request: GenerateRequest) -> tuple[list[int], int]:
    """The tokens of the prompt, then those delivered, and how many are the prompt's.

    Raises `RequestError` if they are none the engine can take.
    """
    check_features(request, engine.info.features)
    context_tokens_max = engine.info.context_tokens_max
    token_ids = engine.encode(request)
    prompt_tokens = len(token_ids)
    check_prompt_fits(prompt_tokens, context_tokens_max, request)
    if request.delivered_ids:
        # The engine alone knows what is a token.
        delivered = GenerateRequest(model=request.model, token_ids=request.delivered_ids)
        token_ids += engine.encode(delivered)
        tokens_max = _tokens_max(engine, request, prompt_tokens)
        if len(token_ids) > tokens_max:
            raise RequestError(
                f"{len(request.delivered_ids)} tokens are delivered already, but the answer has"
                f" {tokens_max - prompt_tokens} at most",
                param="delivered_ids",
            )
    return token_ids, prompt_tokens


def text_behind(engine: StepEngine, request: GenerateRequest) -> TextStream:
    """The text of the answer from here on: what was delivered is shown already."""
    text = TextStream(request.stop)
    for token_id in request.delivered_ids:
        text.push(engine.token_bytes(token_id))
    return text


def ends_with(engine: StepEngine, request: GenerateRequest) -> bool:
    """Whether the last token that was delivered ends the answer."""
    last = request.delivered_ids[-1:]
    return bool(last) and (last[0] in engine.end_token_ids or last[0] in request.stop_token_ids)


def is_answered(engine: StepEngine, request: GenerateRequest, prompt_tokens: int) -> bool:
    """Whether all of the answer was delivered but its end."""
    delivered = request.delivered_ids
    if not delivered:
        return False
    is_full = prompt_tokens + len(delivered) >= _tokens_max(engine, request, prompt_tokens)
    return is_full or ends_with(engine, request) or text_behind(engine, request).is_stopped


def sequence_of(engine: StepEngine, request: GenerateRequest, rng: random.Random) -> TokenSequence:
    """A new sequence; `rng` draws a seed where the request has none. Raises `RequestError`."""
    token_ids, prompt_tokens = known_tokens(engine, request)
    seed = rng.getrandbits(SEED_BITS) if request.seed is None else request.seed
    shaping = None
    if is_shaped(request):
        shaping = Shaping(request=request, token_ids=token_ids, prompt_tokens=prompt_tokens)
        if request.prompt_logprobs is not None and not request.delivered_ids:
            told = prompt_tokens * (request.prompt_logprobs + 1)
            if told > PROMPT_LOGPROBS_MAX:
                raise RequestError(
                    f"'logprobs' asks for {told} log probabilities of a prompt of {prompt_tokens} tokens;"
                    f" at most {PROMPT_LOGPROBS_MAX} are told, so ask for fewer alternatives",
                    param="logprobs",
                )
            shaping.prompt_told = []
    return TokenSequence(
        token_ids=token_ids,
        prompt_tokens=prompt_tokens,
        tokens_max=_tokens_max(engine, request, prompt_tokens),
        sampling=Sampling(
            temperature=request.temperature if request.temperature >= TEMPERATURE_MIN else 0,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            seed=seed % (1 << SEED_BITS),
        ),
        shaping=shaping,
        ends=Ends.of(request, engine.end_token_ids, prompt_tokens),
        tenant=request.tenant,
        is_whole=not request.cache_prompt,
    )


def _tokens_max(engine: StepEngine, request: GenerateRequest, prompt_tokens: int) -> int:
    context_tokens_max = engine.info.context_tokens_max
    wanted = context_tokens_max if request.max_tokens is None else request.max_tokens
    return min(prompt_tokens + wanted, context_tokens_max)


T = TypeVar("T")
_Job = tuple[Callable[[], object], trio.lowlevel.Task]


class StepThread:
    """One thread for all that a model does, from its load to its last step; `run` is a `Hop`.

    Libraries that compute keep threads of their own for each that calls them, and spin or sleep by how many
    there are: with steps in whatever thread is free, OpenMP has more than cores, and a token of llama.cpp
    takes twice as long.
    """

    def __init__(self) -> None:
        self._jobs: Final = SimpleQueue[_Job | None]()
        self._token: Final = trio.lowlevel.current_trio_token()

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call it there, after what was asked before; waits for its end even if cancelled.

        A step writes KV blocks, and whoever got them next would read what it writes.
        """
        self._jobs.put((lambda: function(*arguments), trio.lowlevel.current_task()))
        result: T = await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        return result

    def serve(self) -> None:
        """Run jobs until `close`; in the thread."""
        while (job := self._jobs.get()) is not None:
            function, task = job
            self._token.run_sync_soon(trio.lowlevel.reschedule, task, outcome.capture(function))

    def close(self) -> None:
        """End it after what was asked before."""
        self._jobs.put(None)


@asynccontextmanager
async def open_step_thread() -> AsyncIterator[StepThread]:
    """A thread that ends when the block is left, after the call that is running then."""
    thread = StepThread()
    async with open_nursery() as nursery:
        # Not one of those that calls share: it lasts.
        own = partial(trio.to_thread.run_sync, limiter=trio.CapacityLimiter(1))
        nursery.start_soon(own, thread.serve)
        try:
            yield thread
        finally:
            thread.close()
