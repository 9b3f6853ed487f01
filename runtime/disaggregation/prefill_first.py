"""Prefill first: a prefill worker computes and keeps the blocks, and the decode worker reads them.

    decode worker                            prefill worker
    choose one, and ask it            ──►    take a place, and say so
                                             compute the whole prompt
                                      ◄──    the first token, the blocks, and the ticket to read them
    reserve a place and blocks
    read the missing blocks           ──►    told that they are read: give them back
    adopt

The stream of the question is the life line of both: when the request ends the prefill worker is
told, and stops after the step it is in; when the prefill worker goes the decode worker is, and
computes the prompt itself.

Here are both halves. Who chooses to use them is `engine.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import attrs
import trio

from ..caller.client import Client
from ..config.worker import DisaggregationConfig
from ..context import Context
from ..engines.handoff import HandsOver, Prompt, Reservation
from ..errors import (
    DeadlineError,
    KilledError,
    OverloadedError,
    RefusedError,
    RemoteProtocolError,
    RequestError,
    StaleMemoryError,
    TrinamoError,
    UnavailableError,
)
from ..kv.transfer.engine import EngineTransfers
from ..nurseries import first_of, open_nursery
from ..protocol.disaggregation.decision import PrefillReason
from ..protocol.disaggregation.messages import Begun, Kept, PrefillAsk, prefill_request
from ..protocol.openai.generate import GenerateRequest
from ..sinks import Sleeper
from .engine import Filled, Lending, check_token
from .metrics import PrefillMetrics, PrefillOutcome

MODE: Final = "prefill_first"
_READ: Final = b"read"
"""What a decode worker notifies when it has all blocks."""
_REFUSALS: Final = (OverloadedError, RefusedError, RequestError, UnavailableError)


@attrs.define(eq=False)
class _Asked:
    """One question to a prefill worker: what both tasks know of it."""

    has_begun: bool = False
    kept: Kept | None = None
    reason: PrefillReason | None = None
    """Why there are no blocks, or none any more."""
    changed: Sleeper = attrs.field(factory=Sleeper)
    """Wakes the one task that waits for whatever comes next."""

    async def wait(self, has_come: Callable[[_Asked], object]) -> bool:
        """Return True once it `has_come`, or the question has failed. Safe to cancel."""
        while not (has_come(self) or self.reason):
            await self.changed.sleep()
        return True


@attrs.define(eq=False)
class PrefillFirst:
    """The decode worker's half: one for each process."""

    mode = MODE
    is_reachable = True
    """No broker is in the way."""
    _host: HandsOver
    _transfers: EngineTransfers
    _prefills: Client
    _section: DisaggregationConfig
    lending: Lending
    _asking: int = attrs.field(default=0, init=False)

    @property
    def depth(self) -> int:
        """Prompts of this worker that wait for a place, for each prefill worker."""
        return self._asking // max(1, self._prefills.router.instance_count)

    @asynccontextmanager
    async def filled(
        self, request: GenerateRequest, prompt: Prompt, context: Context
    ) -> AsyncIterator[Filled | PrefillReason]:
        """See `PrefillFlow.filled`; blocks are reserved once the prompt is computed."""
        async with AsyncExitStack() as held:
            with self.lending.promise(prompt) as lend:
                found = await self._fill(held, request, prompt, context, lend)
            yield found

    async def _fill(
        self,
        held: AsyncExitStack,
        request: GenerateRequest,
        prompt: Prompt,
        context: Context,
        lend: Callable[[Reservation], tuple[int, list[int]] | None],
    ) -> Filled | PrefillReason:
        """Ask, reserve, read; what is entered in `held` stays for `adopt`."""
        ends_at = trio.current_time() + self._section.prefill_timeout_s
        asking = await held.enter_async_context(open_nursery())
        held.callback(asking.cancel_scope.cancel)
        asked = _Asked()
        ask = PrefillAsk(
            request=prefill_request(request, list(prompt.token_ids)),
            descriptor=self._transfers.descriptor(),
            timeout_s=self._section.prefill_timeout_s,
        )
        asking.start_soon(self._ask, ask, asked, context)
        with context.cancelled_by_stop():
            has_begun = False
            with trio.move_on_after(self._section.queue_timeout_s):
                has_begun = await asked.wait(lambda asked: asked.has_begun)
            if not has_begun:
                return PrefillReason.NOT_CLAIMED
            with trio.move_on_at(ends_at):
                await asked.wait(lambda asked: asked.kept)
        if context.is_stopped:
            return PrefillReason.STOPPED
        if asked.kept is None:
            return asked.reason or PrefillReason.TIMED_OUT
        try:
            check_token(self._host, asked.kept.first_token)
            reservation = await held.enter_async_context(self._host.reserve(request, context))
        except RemoteProtocolError:
            return PrefillReason.TRANSFER_FAILED
        except KilledError:
            return PrefillReason.STOPPED
        lendable = lend(reservation)
        if lendable is None:
            return PrefillReason.POOL_LENT
        return await self._read(reservation, *lendable, asked, asked.kept, context, ends_at)

    async def _ask(self, ask: PrefillAsk, asked: _Asked, context: Context) -> None:
        """Ask a prefill worker, and hold the stream until that one ends it, or this is cancelled."""
        self._asking += 1
        answer: Any = Begun | Kept
        try:
            with Context(context.id, parent=context) as child:
                # Entered with the first item, which is that it has begun.
                async with self._prefills.stream(ask, answer, context=child) as stream:
                    self._asking -= 1
                    asked.has_begun = True
                    asked.changed.wake()
                    async for item in stream:
                        if isinstance(item, Kept):
                            asked.kept = item
                            asked.changed.wake()
                    if asked.kept is None:
                        raise RemoteProtocolError("the stream ended without an answer")
        except TrinamoError as error:
            is_refusal = isinstance(error, _REFUSALS) and not asked.has_begun
            asked.reason = PrefillReason.REFUSED if is_refusal else PrefillReason.PREFILL_LOST
            asked.changed.wake()
        finally:
            self._asking -= not asked.has_begun

    async def _read(
        self,
        reservation: Reservation,
        skip: int,
        blocks: list[int],
        asked: _Asked,
        kept: Kept,
        context: Context,
        ends_at: float,
    ) -> Filled | PrefillReason:
        """Read the missing blocks, unless the prefill worker goes before they are here."""

        async def read() -> PrefillReason | None:
            leg = context.trace.begin("transfer", direction="read", blocks=len(blocks))
            try:
                with leg:
                    reports = await self._transfers.read(
                        kept.engine_id,
                        blocks,
                        kept.block_ids[skip:],
                        ticket=kept.ticket,
                        deadline_s=max(0.001, ends_at - trio.current_time()),
                        notify=_READ,
                    )
                    leg.tell(backend=reports[-1].backend)
            except (DeadlineError, StaleMemoryError):
                return PrefillReason.TIMED_OUT
            except TrinamoError:
                return PrefillReason.TRANSFER_FAILED
            return None

        async def fail() -> PrefillReason | None:
            await asked.wait(lambda _: False)
            return asked.reason

        with context.cancelled_by_stop():
            reason = await first_of(read, fail)
            return reason or Filled(reservation, kept.first_token, len(blocks))
        return PrefillReason.STOPPED


@attrs.frozen(eq=False)
class KeptPrefills:
    """The prefill worker's half: the handler of its endpoint."""

    _host: HandsOver
    _transfers: EngineTransfers
    _metrics: PrefillMetrics

    async def prefill(
        self, ask: PrefillAsk, context: Context
    ) -> AsyncGenerator[Begun | Kept, None]:
        """Compute one prompt, and keep its blocks until they are read, or nobody wants them.

        Raises what the engine raises, and `StaleMemoryError` if they are not read in time.
        """
        with self._metrics.working(MODE) as record:
            try:
                async with self._host.prefill_and_keep(ask.request, context) as kept:
                    yield Begun()
                    first_token = await kept.first_token()
                    blocks = list(kept.block_ids)
                    async with self._transfers.grant(
                        blocks, ask.descriptor, ttl_s=ask.timeout_s
                    ) as grant:
                        yield Kept(
                            first_token=first_token,
                            engine_id=self._transfers.engine_id,
                            block_ids=blocks,
                            ticket=grant.ticket,
                        )
                        await grant.completed()
                record.outcome = PrefillOutcome.DONE
            except KilledError:
                record.outcome = PrefillOutcome.NOT_WANTED
                raise
            except TrinamoError as error:
                record.failed(context.id, error)
                raise
