"""Decode first: the decode worker has the blocks, and a prefill worker writes into them.

    decode worker                            prefill worker
    reserve a place and blocks
    put the job into the queue        ──►    take it
    lend the missing blocks           ◄──    claim it: a stream that lasts as long as both want it
                                      ──►    told the prompt, which blocks, and the ticket
                                             compute; write each block as soon as it is final
    adopt                             ◄──    the last write brings the first token

The claim comes before the work, so a prompt that nobody waits for any more is never computed. And the
prompt comes with the claim's answer, from who has the blocks: the job on the broker names it by its hash, so
nobody reads it there, and nobody puts another one in its place. The
stream of the claim is the life line of both: when the request ends the prefill worker is told, and
stops after the step it is in; when the prefill worker goes the decode worker is, and computes the
prompt itself. A job is tried once, by who takes it: whatever goes wrong, the decode worker does
not wait for another one.

Here are both halves. Who chooses to use them is `engine.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import attrs
import trio

from ..caller.client import Client
from ..config.worker import DisaggregationConfig
from ..context import Context
from ..engines.handoff import HandsOver, Prompt, Reservation
from ..env import Env, draw_id
from ..errors import (
    KilledError,
    OverloadedError,
    RefusedError,
    RemoteProtocolError,
    StaleMemoryError,
    TrinamoError,
)
from ..kv.transfer.engine import EngineTransfers
from ..nurseries import first_of, open_nursery
from ..planes import LeasedJob, QueueLimits
from ..protocol.disaggregation.decision import PrefillReason
from ..protocol.disaggregation.messages import (
    Claim,
    Lent,
    PrefillDone,
    RemotePrefillRequest,
    decode_done,
    decode_prompt,
    encode,
    hash_of,
    prefill_request,
)
from ..protocol.openai.generate import GenerateRequest
from ..queues.queues import CountedQueue
from ..traces.ring import Traces
from ..traces.trace import Leg
from .engine import Filled, Lending, check_token, first_item, wait_end
from .metrics import PrefillMetrics, PrefillOutcome

_log = logging.getLogger("trinamo.disaggregation")

MODE: Final = "decode_first"
REFUSED_S: Final = 5.0
"""How long no prompt waits for a queue that did not take a job."""
QUEUE_LIMITS: Final = QueueLimits(
    # A job that its taker died with comes again only to be refused: nobody waits so long.
    attempts_max=2,
    depth_max=10_000,
    dead_max=100,
    # Nobody waits for a prompt as long, and there is a record of each.
    duplicate_window_s=30.0,
    remembered_s=120.0,
)


@attrs.define(eq=False)
class _Waiting:
    """One prompt that waits to be computed elsewhere: what both tasks know of it."""

    prompt: bytes
    descriptor: bytes | None = None
    """Of who has claimed it."""
    terms: Lent | None = None
    is_filled: bool = False
    claimed: trio.Event = attrs.field(factory=trio.Event)
    lent: trio.Event = attrs.field(factory=trio.Event)
    """Set when there are terms, or never will be."""
    ended: trio.Event = attrs.field(factory=trio.Event)
    """The request needs no prefill worker any more."""
    left: trio.Event = attrs.field(factory=trio.Event)
    """Who had claimed it went away."""


@attrs.define(eq=False)
class DecodeFirst:
    """The decode worker's half: one for each process."""

    mode = MODE
    _host: HandsOver
    _transfers: EngineTransfers
    _queue: CountedQueue
    _section: DisaggregationConfig
    lending: Lending
    _env: Env
    _is_broker_reachable: Callable[[], bool]
    _waiting: dict[str, _Waiting] = attrs.field(factory=dict, init=False)
    _refused_until: float = attrs.field(default=-math.inf, init=False)
    """Until then the queue is not asked, as it did not take the last job, or one prompt tries whether it takes one."""
    _is_refusal_told: bool = attrs.field(default=False, init=False)

    @property
    def is_reachable(self) -> bool:
        """Whether the broker of the queue is, and took the last job, or has not been asked for a while."""
        return self._is_broker_reachable() and trio.current_time() >= self._refused_until

    @property
    def depth(self) -> int:
        """The jobs of this worker that nobody has claimed, or those of all as last read."""
        own = sum(not each.claimed.is_set() for each in self._waiting.values())
        return max(own, self._queue.last_ready)

    @asynccontextmanager
    async def filled(
        self, request: GenerateRequest, prompt: Prompt, context: Context
    ) -> AsyncIterator[Filled | PrefillReason]:
        """See `PrefillFlow.filled`; the blocks are reserved before anybody is asked."""
        async with AsyncExitStack() as held:
            with self.lending.promise(prompt) as lend:
                try:
                    # It stays for `adopt`.
                    reserved = await held.enter_async_context(self._host.reserve(request, context))
                except KilledError:
                    found: Filled | PrefillReason = PrefillReason.STOPPED
                else:
                    found = await self._fill(reserved, lend(reserved), request, context)
            yield found

    async def _fill(
        self,
        reservation: Reservation,
        lendable: tuple[int, list[int]] | None,
        request: GenerateRequest,
        context: Context,
    ) -> Filled | PrefillReason:
        """Have what is reserved filled by whoever takes the job."""
        if lendable is None:
            return PrefillReason.POOL_LENT
        job_id = draw_id(self._env.rng)
        prompt = encode(prefill_request(request, list(reservation.prompt.token_ids)))
        waiting = self._waiting[job_id] = _Waiting(prompt)
        found: Filled | PrefillReason = PrefillReason.STOPPED
        try:
            with context.cancelled_by_stop():
                with context.trace.begin("queue", queue=self._queue.name, job=job_id) as leg:
                    job = RemotePrefillRequest(
                        id=job_id,
                        request_id=context.id,
                        prompt_hash=hash_of(prompt),
                        instance_id=self._transfers.engine_id,
                        timeout_s=self._section.queue_timeout_s,
                        traceparent=leg.traceparent,
                    )
                    reason = await self._wait_claimed(job, waiting, leg)
                    leg.finish("success" if reason is None else reason.value)
                found = reason or await self._lend(reservation, waiting, *lendable)
        finally:
            del self._waiting[job_id]
            waiting.is_filled = isinstance(found, Filled)
            waiting.ended.set()
            waiting.lent.set()
        return found

    async def _wait_claimed(
        self, job: RemotePrefillRequest, waiting: _Waiting, leg: Leg
    ) -> PrefillReason | None:
        """Put the job into the queue until a prefill worker has it; why, if none has."""
        reason = PrefillReason.QUEUE_AWAY
        now = trio.current_time()
        if now < self._refused_until:
            return reason
        if self._refused_until > -math.inf:
            # This one tries, and the others see what it finds.
            self._refused_until = now + job.timeout_s + REFUSED_S
        with trio.move_on_after(job.timeout_s):
            try:
                await self._queue.put(job.id, encode(job), timeout_s=job.timeout_s / 2)
            except OverloadedError:
                self._refused_until = -math.inf
                return PrefillReason.QUEUE_FULL
            except TrinamoError as error:
                # No prompt waits for it again in the next seconds.
                self._refused_until = trio.current_time() + REFUSED_S
                if not self._is_refusal_told and self._is_broker_reachable():
                    self._is_refusal_told = True
                    text = "queue %s takes no jobs, so prompts are computed here, and one tries again each %g s: %s"
                    _log.warning(text, self._queue.name, REFUSED_S, error)
                return reason
            self._refused_until, self._is_refusal_told = -math.inf, False
            leg.mark("put")
            reason = PrefillReason.NOT_CLAIMED
            await waiting.claimed.wait()
        return None if waiting.claimed.is_set() else reason

    async def _lend(
        self, reservation: Reservation, waiting: _Waiting, skip: int, blocks: list[int]
    ) -> Filled | PrefillReason:
        """Lend the missing blocks to who has claimed the job, until they are filled."""
        try:
            async with self._transfers.grant(
                blocks,
                waiting.descriptor,
                may_write=True,
                ttl_s=self._section.prefill_timeout_s,
            ) as grant:
                waiting.terms = Lent(
                    prompt=waiting.prompt,
                    ticket=grant.ticket,
                    block_ids=blocks,
                    skip_blocks=skip,
                )
                waiting.lent.set()
                word: bytes | None = await first_of(grant.completed, waiting.left.wait)
            if word is None:
                return PrefillReason.PREFILL_LOST
            first_token = decode_done(word).first_token
            check_token(self._host, first_token)
            return Filled(reservation, first_token, len(blocks))
        except StaleMemoryError:
            return PrefillReason.TIMED_OUT
        except TrinamoError:
            return PrefillReason.TRANSFER_FAILED

    async def lend(self, claim: Claim, context: Context) -> AsyncGenerator[Lent, None]:
        """Handle one claim of a prefill worker; the stream ends when it is not needed any more.

        Raises `RefusedError` for a job that nobody waits for, or that somebody else has claimed,
        also later, if what was lent is wanted no more.
        """
        del context  # Kill cancels the scope round this.
        waiting = self._waiting.get(claim.id)
        if waiting is None or waiting.claimed.is_set():
            raise RefusedError(f"nobody waits for job {claim.id}")
        waiting.descriptor = claim.descriptor
        waiting.claimed.set()
        try:
            await waiting.lent.wait()
            if waiting.terms is not None:
                yield waiting.terms
                await waiting.ended.wait()
        finally:
            waiting.left.set()
        if not waiting.is_filled:
            raise RefusedError(f"job {claim.id} is not wanted any more")


@attrs.frozen(eq=False)
class QueuedPrefills:
    """The prefill worker's half: the handler of the queue's jobs."""

    _host: HandsOver
    _transfers: EngineTransfers
    _handoffs: Client
    _metrics: PrefillMetrics
    _traces: Traces

    async def work(self, job: LeasedJob, asked: RemotePrefillRequest) -> None:
        """Compute one prompt, and write it to whoever waits for it. Nothing is tried again.

        How old the job is says nothing: that is the broker's clock against ours. Who put it knows
        whether it is still wanted, and is asked by the claim.

        Cancelled, as when the job's lease is lost, it lets go of everything at once.
        """
        with self._metrics.working(MODE) as record:
            context = Context(asked.request_id)
            context.trace = self._traces.begin(asked.request_id, asked.traceparent)
            claim = Claim(id=asked.id, descriptor=self._transfers.descriptor())
            with context.trace.begin("job", job=asked.id, attempt=job.attempt) as leg:
                try:
                    async with self._handoffs.stream(
                        claim, Lent, context=context, instance_id=asked.instance_id
                    ) as handoff:
                        lent = await first_item(handoff)
                        prompt = decode_prompt(lent.prompt, asked.prompt_hash)
                        # Compute and write, for as long as the decode worker wants it; it ends the stream.
                        async with open_nursery() as nursery:
                            nursery.start_soon(wait_end, handoff)
                            await self._compute(asked.instance_id, prompt, lent, context)
                        record.outcome = PrefillOutcome.DONE
                except RefusedError:
                    record.outcome = PrefillOutcome.NOT_WANTED
                except TrinamoError as error:
                    record.failed(asked.request_id, error)
                is_done = record.outcome is PrefillOutcome.DONE
                leg.finish("success" if is_done else record.outcome.value)

    async def _compute(
        self, decode_worker: str, prompt: GenerateRequest, lent: Lent, context: Context
    ) -> None:
        async with self._host.prefill_and_keep(prompt, context) as kept:
            ours, theirs, skip = kept.block_ids, lent.block_ids, lent.skip_blocks
            if len(ours) != skip + len(theirs):
                raise RemoteProtocolError(
                    f"{len(theirs)} blocks beyond {skip} were lent; the prompt fills {len(ours)}"
                )
            written = skip
            with context.trace.begin("transfer", direction="write", blocks=len(theirs)) as leg:
                while written < len(ours):
                    filled = await kept.wait_filled(written)
                    word: bytes | None = None
                    if filled == len(ours):
                        word = encode(PrefillDone(first_token=await kept.first_token()))
                        leg.mark("computed")
                    reports = await self._transfers.write(
                        decode_worker,
                        ours[written:filled],
                        theirs[written - skip : filled - skip],
                        ticket=lent.ticket,
                        notify=word,
                    )
                    written = filled
                    leg.tell(backend=reports[-1].backend)
