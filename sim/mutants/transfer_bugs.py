"""Mistakes in the life of KV blocks and of what moves them."""

from __future__ import annotations

from typing import Any

import trio

from trinamo.runtime.errors import DisconnectedError
from trinamo.runtime.kv import BlockLeases, NixlMetadataStore, TransferRouter
from trinamo.runtime.kv.transfer import settlement
from trinamo.runtime.kv.transfer.engine import EngineTransfers
from trinamo.runtime.kv.transfer.routes import Route
from trinamo.runtime.kv.transfer.settlement import Grant, Path, Tickets
from trinamo.runtime.planes import TransferReport
from trinamo.runtime.protocol.transfer.settlement import InquiryResult, PeerStatus
from trinamo.transports.memory.transfer import Moving

from .planting import Patch, bug, instead_of, stands

# Blocks of a transfer belong to whoever asked for it, and are free once that has given up.
stands("transfers_hold_no_lease", (BlockLeases, "start", lambda _, start, *__: start()))


@instead_of(Grant, "withdraw")
def withdrawal_frees_at_once(withdraw: Any, self: Any) -> None:
    """Blocks granted to a peer are used again as soon as we want no more, whatever it does."""
    self._needs_proof = False
    withdraw(self)


@bug
def resumed_behind_the_confirmed() -> list[Patch]:
    """What was sent passes for confirmed, and the next backend goes on behind it."""
    launch = Moving._launch  # noqa: SLF001 -- what is replaced

    def hopeful(self: Any) -> None:
        launch(self)
        self._transfer.confirm(self.next)

    return [(Moving, "_launch", hopeful)]


@instead_of(TransferRouter, "_settle")
async def fallback_before_settled(_: Any, __: Any, transfer: Any, *_rest: Any) -> None:
    """The next backend moves the blocks while the last one may still write them."""
    transfer.abort()
    await trio.lowlevel.checkpoint()


@instead_of(TransferRouter, "_attempt")
async def lost_peer_is_done(attempt: Any, self: Any, route: Any, memory: Any, job: Any) -> Any:
    """A transfer whose peer is gone passes for done."""
    try:
        return await attempt(self, route, memory, job)
    except DisconnectedError:
        job.done = len(job.here)
        return TransferReport(
            backend=route.backend,
            path="lost",
            direction=job.direction,
            block_count=job.done,
            byte_count=0,
            duration_s=0.0,
            is_verified=False,
        )


# A connection that brings nothing is kept, and every transfer over it waits for its time to be up.
stands("silent_connection_is_kept", (Route, "hang_up", lambda *_: False))


# --- engines that find each other -------------------------------------------------------------------


@instead_of(EngineTransfers, "_answers")
async def missing_is_gone(*_: Any) -> bool:
    """A peer that the store does not name any more is forgotten, however well it answers."""
    await trio.lowlevel.checkpoint()
    return False


@instead_of(NixlMetadataStore, "find")
async def unregistered_is_nobody(_: Any, self: Any, engine_id: str, **__: Any) -> Any:
    """A peer that is not in the store in the moment when it is looked for cannot be found."""
    return await self.get(engine_id)


@instead_of(EngineTransfers, "drain")
async def leaves_undrained(_: Any, self: Any) -> None:
    """A process that leaves does not wait for the transfers of its blocks."""
    self._is_draining = True
    await trio.lowlevel.checkpoint()


# --- blocks that a peer may still write ---------------------------------------------------------------


@instead_of(Path, "prove")
async def nobody_asked(*_: Any, **__: Any) -> None:
    """Whoever granted blocks waits for a word, which the dead do not say."""
    await trio.sleep_forever()


@instead_of(settlement, "status_of")
def missed_answer_is_death(status_of: Any, result: InquiryResult, *, is_known: bool) -> Any:
    """A peer that cannot be reached, or does not answer, passes for dead."""
    if result in (InquiryResult.SILENT, InquiryResult.UNREACHED):
        return PeerStatus.GONE
    return status_of(result, is_known=is_known)


# Asked for a ticket, a process says that nothing moves, without a look.
stands("settled_while_moving", (Tickets, "is_settled", lambda *_: True))
