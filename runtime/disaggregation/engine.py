"""The engine of a decode worker: each prompt is computed here, or by a prefill worker.

`DisaggregatedEngine.forward` takes the place of its host's. It looks at what the prompt needs, decides
by the table of `protocol/disaggregation/decision.py`, and goes on with the answer when the blocks
are here. Whatever goes wrong elsewhere costs the client nothing but time: the prompt is computed here
then, from the same seed. What the two ways to have a prompt computed elsewhere have in common is here, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Final, Protocol, TypeVar

import attrs
import msgspec

from ..caller.client import ResponseStream
from ..caller.router import Router
from ..context import Context
from ..engines.generation import ForwardsDeltas
from ..engines.handoff import HandsOver, Prompt, Reservation
from ..env import Env
from ..errors import RemoteProtocolError, RequestError
from ..kv.pool import BlockPool, block_count_for
from ..protocol.disaggregation.decision import PrefillReason, Situation, decide
from ..protocol.openai.generate import Delta, GenerateRequest, Task
from ..sinks import Sink
from .metrics import DecodeMetrics


class Lending:
    """The bound of one pool: how much of it may depend on prefill workers.

    Those that hang give nothing back: blocks that a peer may write, or that a read may still fill,
    are nobody's until that has settled, or is proven never to happen. So no more than a share of the
    pool is promised, lent or in quarantine at a time, and prompts beyond it are computed where their
    answer is.
    """

    def __init__(self, pool: BlockPool, *, block_tokens: int, share: float) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._blocks_max = int(share * pool.block_count)
        self._promised = 0

    @property
    def room(self) -> int:
        """How many more blocks may be promised now."""
        held = self._pool.in_flight_count + self._pool.quarantined_count
        return self._blocks_max - self._promised - held

    def missing(self, prompt: Prompt) -> int:
        """How many blocks of `prompt` would have to come."""
        skip = prompt.cached_tokens // self._block_tokens
        return block_count_for(len(prompt.token_ids), self._block_tokens) - skip

    @contextmanager
    def promise(
        self, prompt: Prompt
    ) -> Iterator[Callable[[Reservation], tuple[int, list[int]] | None]]:
        """Count the missing blocks of `prompt` as promised until the block is left.

        What it yields leases those of a reservation instead, and says how many leading blocks are
        there already, and the ids of those to be filled. None if these have become more than the
        bound lets: then nothing is leased.
        """
        promised, lent = self.missing(prompt), list[int]()
        self._promised += promised

        def lend(reservation: Reservation) -> tuple[int, list[int]] | None:
            nonlocal promised
            self._promised -= promised
            promised = 0
            skip = reservation.prompt.cached_tokens // self._block_tokens
            blocks = list(reservation.block_ids[skip:])
            if len(blocks) > self.room:
                return None
            self._pool.lease(blocks)
            lent.extend(blocks)
            return skip, blocks

        try:
            yield lend
        finally:
            self._promised -= promised
            self._pool.release(lent)


T = TypeVar("T")


@attrs.frozen
class Filled:
    """A reservation all of whose blocks are filled: it can be adopted."""

    reservation: Reservation
    first_token: int
    block_count: int
    """How many blocks were moved for it."""


class PrefillFlow(Protocol):
    """One way to have a prompt computed by a prefill worker, as the decode worker sees it."""

    mode: str
    """As `disaggregation.mode` calls it."""
    lending: Lending

    @property
    def is_reachable(self) -> bool:
        """Whether anybody would hear of a prompt."""
        ...

    @property
    def depth(self) -> int:
        """Prompts that wait for a prefill worker, as far as is known here."""
        ...

    def filled(
        self, request: GenerateRequest, prompt: Prompt, context: Context
    ) -> AbstractAsyncContextManager[Filled | PrefillReason]:
        """Have the prompt of `request`, which has a seed, computed elsewhere.

        Yields a reservation that can be adopted inside, or why there is none: then nothing is held,
        and the prompt can be computed here. Raises what `HandsOver.reserve` raises. Cancelled, it
        gives back what it holds; blocks that the other side may touch are free when it cannot.
        """
        ...


def check_token(host: HandsOver, token_id: int) -> None:
    """Raise `RemoteProtocolError` for what a prefill worker calls a token, and `host` does not.

    A step that goes on from it would fail, and with it the answers of all others.
    """
    try:
        host.examine(GenerateRequest(model="", token_ids=[token_id]))
    except RequestError as error:
        raise RemoteProtocolError(f"the first token is {token_id}: {error}") from error


async def first_item(stream: ResponseStream[T]) -> T:
    """The one item of a stream that then only says how long it lasts."""
    async for item in stream:
        return item
    raise RemoteProtocolError("the stream ended without an item")


async def wait_end(stream: ResponseStream[Any]) -> None:
    """Return at the stream's complete end; raises what else ended it."""
    async for _ in stream:
        raise RemoteProtocolError("the stream has a second item")


_log = logging.getLogger("trinamo.disaggregation")
_SEED_BITS: Final = 64


@attrs.frozen
class DisaggregationLimits:
    """The bounds in force now; they may change while the cluster runs."""

    tokens_local_max: int
    queue_depth_max: int


class DecodeHost(HandsOver, ForwardsDeltas, Protocol):
    """What a decode worker needs of its engine."""


@attrs.frozen(eq=False)
class DisaggregatedEngine:
    """Answers requests like its host, whose prompts may come from elsewhere."""

    _host: DecodeHost
    _flow: PrefillFlow
    _prefills: Router
    _limits: Callable[[], DisaggregationLimits]
    _env: Env
    _metrics: DecodeMetrics

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
