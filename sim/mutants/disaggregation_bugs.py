"""Mistakes in having prompts computed elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import trio

from trinamo.runtime.caller.clients import Clients
from trinamo.runtime.context import Context
from trinamo.runtime.disaggregation import decode_first, prefill_first
from trinamo.runtime.disaggregation.decode_first import DecodeFirst, QueuedPrefills
from trinamo.runtime.disaggregation.engine import DisaggregatedEngine, Filled
from trinamo.runtime.disaggregation.prefill_first import PrefillFirst
from trinamo.runtime.engines.loop.pinned import Pinned
from trinamo.runtime.engines.loop.steps import StepLoop
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.kv.transfer.settlement import Grant
from trinamo.runtime.protocol.disaggregation.decision import PrefillReason
from trinamo.runtime.protocol.disaggregation.messages import decode_prompt, prefill_request
from trinamo.runtime.sinks import Sink
from trinamo.runtime.worker.worker import Worker

from .planting import NOTHING, Patch, bug, instead_of, stands


@instead_of(Pinned, "wait_filled")
async def filled_before_computed(wait: Any, self: Any, count: int) -> int:
    """A prefill worker writes blocks before it has computed them."""
    filled: int = await wait(self, count)
    last = len(self.block_ids) - 1
    return filled if filled > last else min(filled + 2, last)


@instead_of(PrefillFirst, "_read")
async def adopted_unread(
    _: Any, __: Any, reservation: Any, ___: int, ____: Any, _____: Any, kept: Any, *_more: Any
) -> Filled:
    """A decode worker goes on from blocks before it has read them."""
    await trio.lowlevel.checkpoint()
    return Filled(reservation, kept.first_token, 0)


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
def prefill_ends_early() -> list[Patch]:
    """A prefill worker is not told that its token may not be one that ends the answer."""

    def without(request: Any, token_ids: list[int]) -> Any:
        return msgspec.structs.replace(prefill_request(request, token_ids), min_tokens=0)

    return [(each, "prefill_request", without) for each in (decode_first, prefill_first)]


class _Endless(Sink[Any]):
    """Hands on all but the end."""

    def __init__(self, sink: Sink[Any]) -> None:
        super().__init__()
        self._sink = sink

    def on_room(self, listener: Callable[[], None]) -> None:
        self._sink.on_room(listener)

    def take(self, items: list[Any]) -> bool:
        return self._sink.take(items)


@instead_of(DisaggregatedEngine, "_forward_remote")
async def answered_twice(remote: Any, *args: Any) -> PrefillReason:
    """An answer from blocks that came passes for one that failed, and is made once more."""
    *asked, sink = args
    return await remote(*asked, _Endless(sink)) or PrefillReason.PREFILL_LOST


@instead_of(DisaggregatedEngine, "_forward_remote")
async def lost_prefill_fails_the_request(remote: Any, *args: Any) -> None:
    """Whatever goes wrong at a prefill worker ends the request."""
    if reason := await remote(*args):
        raise TrinamoError(f"the prefill failed: {reason}")


@bug
def lost_prefill_is_waited_for() -> list[Patch]:
    """A decode worker does not hear that its prefill worker has gone, and waits out the time."""

    async def patient(wait: Any, *_: Any) -> Any:
        return await wait()

    return [(decode_first, "first_of", patient), (prefill_first, "first_of", patient)]


@instead_of(decode_first, "wait_end")
async def life_line_unheard(wait_end: Any, stream: Any) -> None:
    """A prefill worker does not hear that its decode worker wants the prompt no more."""
    with suppress(TrinamoError):
        await wait_end(stream)


@bug
def unclaimed_is_computed() -> list[Patch]:
    """A job brings its prompt along, which is computed before anybody is asked who waits for it."""
    wait, work, prompts = DecodeFirst._wait_claimed, QueuedPrefills.work, dict[str, bytes]()  # noqa: SLF001 -- what is replaced

    async def along(self: Any, job: Any, waiting: Any, leg: Any) -> Any:
        prompts[job.id] = waiting.prompt
        return await wait(self, job, waiting, leg)

    async def eager(self: Any, job: Any, asked: Any) -> None:
        prompt = decode_prompt(prompts[asked.id], asked.prompt_hash)
        with Context(asked.request_id) as context, suppress(TrinamoError):
            async with self._host.prefill_and_keep(prompt, context) as kept:
                await kept.first_token()
        await work(self, job, asked)

    return [(DecodeFirst, "_wait_claimed", along), (QueuedPrefills, "work", eager)]


# Blocks that were lent stay so, whatever becomes of whom they were lent to.
stands("grant_never_ends", (Grant, "withdraw", NOTHING))


@instead_of(Clients, "hold")
async def claims_follow_blocks(hold: Any, self: Any, endpoint: Any, **_: Any) -> Any:
    """A prefill worker follows the blocks of those whom jobs name, as if it chose among them."""
    return await hold(self, endpoint)


# What a prefill worker asks of a decode worker takes the place of a request there.
stands("claims_take_places", (Worker, "admitted_count", Worker.active_count))
