"""A decode host reads the blocks that a prefill host has computed and granted.

    decode    ask ─────────────▶ prefill    takes blocks, computes, grants
              ◀──────────── ready
              reads
              done | drop, settled ─▶        ends the grant

An aborted or failed read may go on touching both ends' blocks, so `drop` frees nothing by itself:
the reader's blocks are leased until its transfers have settled, the prefill host's, where nobody
fences, until the reader says `settled`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.protocol.transfer import Direction

from ..load import COMPLETE

if TYPE_CHECKING:
    from .mail import Inbox, Word
    from .process import KvProcess

__all__ = ["fetch_by_reading", "serve_reader"]


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
        grant = process.leases.grant(process.region, blocks)
        body = (process.region.describe(), tuple(blocks), grant.ticket)
        mail.post(ask.source, "ready", name, body)
        word = await inbox.word(2 * plan.deadline_s)
        if word is not None and word.kind == "done":
            grant.complete()
        else:
            grant.withdraw()
        process.give_back(blocks)
        while word is not None and word.kind == "drop":
            word = await inbox.word(plan.drain_s)
        if word is not None and word.kind == "settled":
            grant.acknowledge()


async def fetch_by_reading(
    process: KvProcess, name: str, prefill: str, abort_after_s: float
) -> str:
    """At the decode host: one request; how it ended, `COMPLETE` if every block came."""
    plan, mail = process.plan, process.mail
    count = process.env.rng.randint(*plan.request_blocks)
    with mail.inbox(name) as inbox:
        mail.post(prefill, "ask", name, count)
        ready = await inbox.word(plan.deadline_s)
        if ready is None or ready.kind != "ready":
            _drop(process, name, prefill)
            return "unanswered"
        blocks = await process.take(name, count)
        if blocks is None:
            _drop(process, name, prefill)
            return "no blocks"
        process.fill(blocks, f"{name} before")
        outcome = await _read(process, name, blocks, ready, abort_after_s)
        if outcome == COMPLETE:
            mail.post(prefill, "done", name)
            await use(process, name, blocks)
        process.give_back(blocks)
        if outcome != COMPLETE:
            mail.post(prefill, "drop", name)
            if await process.settle(name):
                mail.post(prefill, "settled", name)
        return outcome


def _drop(process: KvProcess, name: str, prefill: str) -> None:
    # Nothing was ever started.
    process.mail.post(prefill, "drop", name)
    process.mail.post(prefill, "settled", name)


async def _read(
    process: KvProcess, name: str, blocks: list[int], ready: Word, abort_after_s: float
) -> str:
    offer, there, ticket = ready.body
    outcome = "aborted"
    with trio.move_on_after(abort_after_s):
        try:
            peer = await process.peer(offer)
            process.note("kv.move", request=name, blocks=len(blocks))
            await process.router.move(
                Direction.READ,
                process.region,
                blocks,
                peer,
                there,
                deadline_s=process.plan.deadline_s,
                ticket=ticket,
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


async def written_or_over(inbox: Inbox, wait_s: float) -> str:
    """The next word's kind, `unanswered` if none comes in time."""
    word = await inbox.word(wait_s)
    return "unanswered" if word is None else word.kind
