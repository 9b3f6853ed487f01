"""A prefill host writes the blocks it has computed into those that a decode host grants.

    decode    takes blocks, grants
              ask ─────────────▶ prefill    takes blocks, computes, writes
              ◀──── written (the transfer's own notification) | settled
              abort ───────────▶            cancels the transfer
              ◀────────── settled

The writer's word `settled` is what frees granted blocks after an abort where nobody fences.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.protocol.transfer import Direction

from ..load import COMPLETE
from .pull import use, written_or_over

if TYPE_CHECKING:
    from .mail import Inbox, Word
    from .process import KvProcess

__all__ = ["fetch_by_being_written", "serve_by_writing"]


async def serve_by_writing(process: KvProcess, ask: Word) -> None:
    """At the prefill host: compute, write, and say when nothing of it is under way any more."""
    mail, name = process.mail, ask.request
    with mail.inbox(name) as inbox:
        blocks = await process.take(name, len(ask.body[1]))
        if blocks is None:
            mail.post(ask.source, "settled", name)
            return
        outcome = "aborted"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_heed_abort, inbox, nursery.cancel_scope)
            await trio.sleep(process.drawn(process.plan.compute_s))
            process.fill(blocks, name)
            outcome = await _write(process, name, blocks, ask)
            nursery.cancel_scope.cancel()
        process.give_back(blocks)
        if outcome != COMPLETE and await process.settle(name):
            mail.post(ask.source, "settled", name)


async def _heed_abort(inbox: Inbox, scope: trio.CancelScope) -> None:
    while True:
        word = await inbox.word(60.0)
        if word is not None and word.kind == "abort":
            scope.cancel()


async def _write(process: KvProcess, name: str, blocks: list[int], ask: Word) -> str:
    offer, there, ticket = ask.body
    try:
        peer = await process.peer(offer)
        process.note("kv.move", request=name, blocks=len(blocks))
        await process.router.move(
            Direction.WRITE,
            process.region,
            blocks,
            peer,
            there,
            deadline_s=process.plan.deadline_s,
            notify=name.encode(),
            ticket=ticket,
        )
    except TrinamoError as error:
        return error.code
    return COMPLETE


async def fetch_by_being_written(
    process: KvProcess, name: str, prefill: str, abort_after_s: float
) -> str:
    """At the decode host: one request; how it ended, `COMPLETE` if every block came."""
    plan, mail = process.plan, process.mail
    with mail.inbox(name) as inbox:
        blocks = await process.take(name, process.env.rng.randint(*plan.request_blocks))
        if blocks is None:
            return "no blocks"
        process.fill(blocks, f"{name} before")
        grant = process.leases.grant(process.region, blocks)
        body = (process.region.describe(), tuple(blocks), grant.ticket)
        mail.post(prefill, "ask", name, body)
        wait_s = min(abort_after_s, 2 * plan.deadline_s)
        kind = await written_or_over(inbox, wait_s)
        if kind == "written":
            grant.complete()
            await use(process, name, blocks)
            process.give_back(blocks)
            return COMPLETE
        if kind == "settled":
            grant.acknowledge()
        grant.withdraw()
        process.give_back(blocks)
        if kind == "settled":
            return "failed"
        mail.post(prefill, "abort", name)
        while not grant.is_settled:
            if await written_or_over(inbox, plan.drain_s) in ("settled", "written"):
                grant.acknowledge()
            else:
                break
        return "aborted" if math.isfinite(abort_after_s) else kind
