"""The engine of a decode worker: each prompt is computed here, or by a prefill worker.

`DisaggregatedEngine.forward` takes the place of its host's. It looks at what the prompt needs, decides
by the table of `protocol/disaggregation/decision.py`, and goes on with the answer when the blocks
are here. Whatever goes wrong elsewhere costs the client nothing but time: the prompt is computed here
then, from the same seed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

import attrs
import msgspec

from ..caller.router import Router
from ..context import Context
from ..engines.generation import ForwardsDeltas
from ..engines.handoff import HandsOver, Prompt
from ..env import Env
from ..protocol.disaggregation.decision import PrefillReason, Situation, decide
from ..protocol.openai.generate import Delta, GenerateRequest, Task
from ..sinks import Sink
from .flow import Filled, PrefillFlow
from .metrics import DecodeMetrics

_log = logging.getLogger("trinamo.disaggregation")
_SEED_BITS: Final = 64


@attrs.frozen
class DisaggregationLimits:
    """The bounds in force now; they may change while the cluster runs."""

    tokens_local_max: int
    queue_depth_max: int


class DecodeHost(HandsOver, ForwardsDeltas, Protocol):
    """What a decode worker needs of its engine."""


class DisaggregatedEngine:
    """Answers requests like its host, whose prompts may come from elsewhere."""

    def __init__(
        self,
        host: DecodeHost,
        flow: PrefillFlow,
        prefills: Router,
        *,
        limits: Callable[[], DisaggregationLimits],
        env: Env,
        metrics: DecodeMetrics,
    ) -> None:
        self._host = host
        self._flow = flow
        self._prefills = prefills
        self._limits = limits
        self._env = env
        self._metrics = metrics

    async def forward(self, request: GenerateRequest, context: Context, sink: Sink[Delta]) -> None:
        """Push one answer; see `ForwardsDeltas.forward`. The tokens are those of the host alone.

        What is no answer has no prompt that others compute.
        """
        request = await self._host.prepare(request)
        if request.task is not Task.GENERATE:
            await self._host.forward(request, context, sink)
            return
        prompt = self._host.examine(request)
        limits = self._limits()
        missing = 0 if prompt.is_answered else len(prompt.token_ids) - prompt.cached_tokens
        situation = Situation(
            wants_logprobs=request.logprobs is not None or request.prompt_logprobs is not None,
            missing_tokens=missing,
            tokens_local_max=limits.tokens_local_max,
            has_prefill_worker=self._prefills.has_live(),
            is_queue_reachable=self._flow.is_reachable,
            queue_depth=self._flow.depth,
            queue_depth_max=limits.queue_depth_max,
            missing_blocks=self._flow.lending.missing(prompt),
            lendable_blocks=self._flow.lending.room,
        )
        reason = decide(situation)
        if reason.is_remote and context.is_stopped:
            reason = PrefillReason.STOPPED
        if reason.is_remote:
            if request.seed is None:
                # Two engines, and this one again if the other fails, must draw from the same.
                seed = self._env.rng.getrandbits(_SEED_BITS)
                request = msgspec.structs.replace(request, seed=seed)
            found = await self._forward_remote(request, prompt, context, sink)
            if found is None:
                return
            reason = found
            if reason is not PrefillReason.STOPPED:
                text = "request %s: its prompt is computed here after all: %s"
                _log.info(text, context.id, reason)
        self._metrics.decided(reason)
        self._env.note("prefill.local", request=context.id, reason=reason.value)
        await self._host.forward(request, context, sink)

    async def _forward_remote(
        self, request: GenerateRequest, prompt: Prompt, context: Context, sink: Sink[Delta]
    ) -> PrefillReason | None:
        """Answer from blocks that come from elsewhere; why not, if none came."""
        leg = context.trace.begin("remote_prefill", mode=self._flow.mode)
        with leg, self._metrics.under_way() as record:
            async with self._flow.filled(request, prompt, context) as found:
                # The stop may come with the last block. There is no checkpoint from here to `adopt`.
                if not isinstance(found, Filled) or context.is_stopped:
                    reason = PrefillReason.STOPPED if isinstance(found, Filled) else found
                    leg.finish(reason.value)
                    return reason
                leg.finish("success", blocks=found.block_count)
                record.came(found.block_count)
                self._metrics.decided(PrefillReason.LONG_PROMPT)
                self._env.note("prefill.remote", request=context.id, blocks=found.block_count)
                await found.reservation.adopt(found.first_token, sink)
        return None
