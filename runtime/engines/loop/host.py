"""One step engine for many requests at once: what may be asked of it.

The steps and what becomes of their tokens are in `steps.py`, who takes part in one in
`scheduler.py`, how a model computes in `step.py`. The simulator replaces the hop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial

from ...context import Context
from ...env import Env, RealEnv
from ...errors import RequestError
from ...kv.cache import KvCache
from ...kv.pool import BlockPool
from ...nurseries import open_nursery
from ...protocol.kv.names import BlockNames
from ...protocol.openai.generate import Delta, FinishReason, GenerateRequest, check_features
from ...sinks import Ending, Iteration, Sink
from ..generation import BlockListener, EngineInfo, EngineStatistics
from ..handoff import KeptPrefill, Prompt, Reservation
from .answer import Answer, Finish
from .hop import open_step_thread
from .pinned import Pinned, Reserved
from .requests import ends_with, is_answered, known_tokens, sequence_of, text_behind
from .scheduler import Scheduler
from .sequence import TokenSequence
from .step import Hop, KeepsKv, KeepsPrefixes, Prepares, StagesKv, StepEngine
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
        ending = Ending()
        answer = self._submit(request, context, sink, ending.reach)
        try:
            await ending.wait()
        finally:
            self._steps.leave(answer)

    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[Delta, None]:
        """Stream one answer; see `GenerationEngine.generate`."""
        request = await self.prepare(request)
        deltas = Iteration[Delta](self._queued_deltas_max)
        answer = self._submit(request, context, deltas, deltas.finish)
        try:
            async for delta in deltas:
                yield delta
        finally:
            self._steps.leave(answer)

    def _submit(
        self, request: GenerateRequest, context: Context, sink: Sink[Delta], finish: Finish
    ) -> Answer:
        self._steps.check_open()
        sequence = sequence_of(self._engine, request, self._env.rng)
        answer = self._answer(sequence, request, context, sink, finish)
        is_stop = answer.text.is_stopped or ends_with(self._engine, request.delivered_ids)
        if is_stop or sequence.is_full:
            # All was delivered but the end.
            reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
            answer.send(answer.text.finish(), reason)
            answer.finish(None)
            return answer
        self._steps.submit(sequence)
        self._steps.follow(answer)
        return answer

    def _answer(
        self,
        sequence: TokenSequence,
        request: GenerateRequest,
        context: Context,
        sink: Sink[Delta],
        finish: Finish,
    ) -> Answer:
        sink.starts(partial(self._steps.resume, sequence))
        text = text_behind(self._engine, request)
        return Answer(sequence, text, sink, finish, context, self._steps.stop)

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
        return Prompt(
            token_ids=token_ids,
            cached_tokens=self._scheduler.count_cached(token_ids, request.tenant),
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
        pinned = Pinned(
            *(sequence, context, self.info.block_tokens, self._steps.stop),
            is_staged=isinstance(self._engine, StagesKv),
        )
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
        answer = self._answer(pinned.sequence, request, context, sink, ending.reach)
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
