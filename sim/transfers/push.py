"""A prefill host writes the blocks it has computed into those that a decode host grants.

    decode    ask ─────────────────▶ prefill    takes blocks, computes
              ◀─ ready (who it is)
              takes blocks, grants
              granted ─────────────▶            writes
              ◀── the transfer's own notification | failed
              drop ────────────────▶            cancels the transfer

After a `drop`, and where nobody fences, the prefill host is asked before granted blocks are used again.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import trio

from trinamo.runtime.errors import StaleMemoryError, TrinamoError

from ..cluster.workload import COMPLETE
from .pull import answer_to, use

if TYPE_CHECKING:
    from trinamo.runtime.kv.transfer.grants import Grant

    from .mail import Inbox, Word
    from .process import KvProcess

__all__ = ["fetch_by_being_written", "serve_by_writing"]


async def serve_by_writing(process: KvProcess, ask: Word) -> None:
    """At the prefill host: compute, ask for blocks, and write."""
    plan, mail, name = process.plan, process.mail, ask.request
    with mail.inbox(name) as inbox:
        blocks = await process.take(name, ask.body)
        if blocks is None:
            mail.post(ask.source, "failed", name)
            return
        await trio.sleep(process.drawn(plan.compute_s))
        process.fill(blocks, name)
        mail.post(ask.source, "ready", name, process.transfers.descriptor())
        granted = await inbox.word(plan.deadline_s)
        if granted is not None and granted.kind == "granted":
            outcome = "aborted"
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_heed_drop, inbox, nursery.cancel_scope)
                outcome = await _write(process, name, blocks, granted)
                nursery.cancel_scope.cancel()
            if outcome != COMPLETE:
                mail.post(ask.source, "failed", name)
        process.give_back(blocks)


async def _heed_drop(inbox: Inbox, scope: trio.CancelScope) -> None:
    while True:
        word = await inbox.word(60.0)
        if word is not None and word.kind == "drop":
            scope.cancel()


async def _write(process: KvProcess, name: str, blocks: list[int], granted: Word) -> str:
    engine_id, there, ticket = granted.body
    try:
        await process.transfers.write(
            engine_id,
            blocks,
            there,
            ticket=ticket,
            deadline_s=process.plan.deadline_s,
            notify=name.encode(),
        )
    except TrinamoError as error:
        return error.code
    return COMPLETE


async def fetch_by_being_written(
    process: KvProcess, name: str, prefill: str, abort_after_s: float
) -> str:
    """At the decode host: one request; how it ended, `COMPLETE` if every block came."""
    plan, mail = process.plan, process.mail
    count = process.env.rng.randint(*plan.request_blocks)
    with mail.inbox(name) as inbox:
        mail.post(prefill, "ask", name, count)
        ready = await answer_to(inbox, plan.deadline_s)
        if isinstance(ready, str):
            mail.post(prefill, "drop", name)
            return ready
        blocks = await process.take(name, count)
        if blocks is None:
            mail.post(prefill, "drop", name)
            return "no blocks"
        process.fill(blocks, f"{name} before")
        ttl_s = 2 * plan.deadline_s
        lend = partial(process.transfers.grant, blocks, ready.body, may_write=True, ttl_s=ttl_s)
        try:
            async with lend() as grant:
                mail.post(prefill, "granted", name, (process.name, tuple(blocks), grant.ticket))
                outcome = await _be_written(inbox, grant, abort_after_s)
        except TrinamoError as error:
            outcome = error.code
        if outcome == COMPLETE:
            await use(process, name, blocks)
        else:
            mail.post(prefill, "drop", name)
        process.give_back(blocks)
        return outcome


async def _be_written(inbox: Inbox, grant: Grant, abort_after_s: float) -> str:
    outcome = "aborted"
    with trio.move_on_after(abort_after_s):
        async with trio.open_nursery() as nursery:

            async def heed_failure() -> None:
                nonlocal outcome
                if await inbox.word(math.inf) is not None:
                    outcome = "failed"
                    nursery.cancel_scope.cancel()

            nursery.start_soon(heed_failure)
            try:
                await grant.completed()
                outcome = COMPLETE
            except StaleMemoryError:
                outcome = "unanswered"
            nursery.cancel_scope.cancel()
    return outcome
