"""A decode host reads the blocks that a prefill host has computed and granted.

    decode    ask ─────────────────▶ prefill    takes blocks, computes, grants
              ◀────────────── ready
              reads
              done | drop ─────────▶            ends the grant

An aborted or failed read may go on touching the reader's own blocks, so those are leased until its
transfers have settled. The prefill host's are free at once: what is still read of them is thrown away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from trinamo.runtime.errors import TrinamoError

from ..cluster.workload import COMPLETE

if TYPE_CHECKING:
    from .mail import Inbox, Word
    from .process import KvProcess

__all__ = ["answer_to", "fetch_by_reading", "serve_reader", "use"]


async def serve_reader(process: KvProcess, ask: Word) -> None:
    """At the prefill host: compute, let the asker read, and wait for its word."""
    plan, mail, name = process.plan, process.mail, ask.request
    with mail.inbox(name) as inbox:
        blocks = await process.take(name, ask.body)
        if blocks is None:
            mail.post(ask.source, "failed", name)
            return
        await trio.sleep(process.drawn(plan.compute_s))
        process.fill(blocks, name)
        try:
            async with process.transfers.grant(blocks, ttl_s=2 * plan.deadline_s) as grant:
                mail.post(ask.source, "ready", name, (process.name, tuple(blocks), grant.ticket))
                await inbox.word(2 * plan.deadline_s)
        except TrinamoError:
            mail.post(ask.source, "failed", name)
        process.give_back(blocks)


async def fetch_by_reading(
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
        outcome = await _read(process, blocks, ready, abort_after_s)
        mail.post(prefill, "done" if outcome == COMPLETE else "drop", name)
        if outcome == COMPLETE:
            await use(process, name, blocks)
        process.give_back(blocks)
        return outcome


async def answer_to(inbox: Inbox, wait_s: float) -> Word | str:
    """The word `ready` after we have asked; what became of the request if there is none."""
    word = await inbox.word(wait_s)
    if word is None:
        return "unanswered"
    return word if word.kind == "ready" else "refused"


async def _read(process: KvProcess, blocks: list[int], ready: Word, abort_after_s: float) -> str:
    engine_id, there, ticket = ready.body
    outcome = "aborted"
    with trio.move_on_after(abort_after_s):
        try:
            await process.transfers.read(
                engine_id, blocks, there, ticket=ticket, deadline_s=process.plan.deadline_s
            )
            outcome = COMPLETE
        except TrinamoError as error:
            outcome = error.code
    return outcome


async def use(process: KvProcess, name: str, blocks: list[int]) -> None:
    """Decode: the bytes are right when they are reported, and stay so as long as they are ours."""
    process.check(blocks, name, "when it was reported complete")
    process.note("kv.done", request=name)
    await trio.sleep(process.drawn(process.plan.hold_s))
    process.check(blocks, name, "while it was in use")
