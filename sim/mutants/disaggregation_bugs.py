"""Mistakes in having prompts computed elsewhere; see `bugs.py`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import trio

from trinamo.runtime.context import Context
from trinamo.runtime.disaggregation import decode_first, prefill_first
from trinamo.runtime.disaggregation.decode_first import QueuedPrefills
from trinamo.runtime.disaggregation.engine import DisaggregatedEngine
from trinamo.runtime.disaggregation.flow import Filled, wait_end
from trinamo.runtime.disaggregation.prefill_first import PrefillFirst
from trinamo.runtime.engines.loop.pinned import Pinned
from trinamo.runtime.engines.loop.steps import StepLoop
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.kv.transfer.grants import Grant
from trinamo.runtime.protocol.disaggregation.decision import PrefillReason

from .planting import Patch, bug


@bug
def filled_before_computed() -> list[Patch]:
    """A prefill worker writes blocks before it has computed them."""
    wait = Pinned.wait_filled

    async def early(self: Any, count: int) -> int:
        filled = await wait(self, count)
        last = len(self.block_ids) - 1
        return filled if filled > last else min(filled + 2, last)

    return [(Pinned, "wait_filled", early)]


@bug
def adopted_unread() -> list[Patch]:
    """A decode worker goes on from blocks before it has read them."""

    async def blind(
        _: Any, reservation: Any, __: int, ___: Any, ____: Any, kept: Any, *_more: Any
    ) -> Filled:
        await trio.lowlevel.checkpoint()
        return Filled(reservation, kept.first_token, 0)

    return [(PrefillFirst, "_read", blind)]


@bug
def first_token_lost() -> list[Patch]:
    """The token that came with the blocks is gone on from, and not handed out."""
    adopt, take = StepLoop.adopt, StepLoop._take  # noqa: SLF001 -- what is replaced

    def silent(self: Any, answer: Any, first_token: int) -> None:
        self._take = lambda *_: None
        adopt(self, answer, first_token)
        self._take = take.__get__(self)

    return [(StepLoop, "adopt", silent)]


@bug
def answered_twice() -> list[Patch]:
    """An answer from blocks that came passes for one that failed, and is made once more."""
    remote = DisaggregatedEngine._forward_remote  # noqa: SLF001 -- what is replaced

    async def forgetful(self: Any, *args: Any) -> PrefillReason:
        return await remote(self, *args) or PrefillReason.PREFILL_LOST

    return [(DisaggregatedEngine, "_forward_remote", forgetful)]


@bug
def lost_prefill_fails_the_request() -> list[Patch]:
    """Whatever goes wrong at a prefill worker ends the request."""

    async def strict(self: Any, *args: Any) -> PrefillReason | None:
        reason = await remote(self, *args)
        if reason is not None:
            raise TrinamoError(f"the prefill failed: {reason}")
        return None

    remote = DisaggregatedEngine._forward_remote  # noqa: SLF001 -- what is replaced
    return [(DisaggregatedEngine, "_forward_remote", strict)]


@bug
def lost_prefill_is_waited_for() -> list[Patch]:
    """A decode worker does not hear that its prefill worker has gone, and waits out the time."""

    async def patient(wait: Any, *_: Any) -> Any:
        return await wait()

    return [(decode_first, "first_of", patient), (prefill_first, "first_of", patient)]


@bug
def life_line_unheard() -> list[Patch]:
    """A prefill worker does not hear that its decode worker wants the prompt no more."""

    async def deaf(stream: Any) -> None:
        with suppress(TrinamoError):
            await wait_end(stream)

    return [(decode_first, "wait_end", deaf)]


@bug
def unclaimed_is_computed() -> list[Patch]:
    """A prefill worker computes a job before it asks whether anybody waits for it."""
    work = QueuedPrefills.work

    async def eager(self: Any, job: Any, asked: Any) -> None:
        with Context(asked.request_id) as context, suppress(TrinamoError):
            async with self._host.prefill_and_keep(asked.request, context) as kept:
                await kept.first_token()
        await work(self, job, asked)

    return [(QueuedPrefills, "work", eager)]


@bug
def grant_never_ends() -> list[Patch]:
    """Blocks that were lent stay so, whatever becomes of whom they were lent to."""
    return [(Grant, "withdraw", lambda _: None)]
