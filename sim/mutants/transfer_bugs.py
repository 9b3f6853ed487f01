"""Mistakes in the life of KV blocks and of what moves them; see `bugs.py`."""

from __future__ import annotations

from typing import Any

import trio

from trinamo.runtime.errors import DisconnectedError
from trinamo.runtime.kv import BlockLeases, NixlMetadata, NixlMetadataStore, TransferRouter
from trinamo.runtime.kv.transfer import settlement
from trinamo.runtime.kv.transfer.engine import EngineTransfers
from trinamo.runtime.kv.transfer.grants import Grant
from trinamo.runtime.kv.transfer.settlement import Path, Tickets
from trinamo.runtime.planes import TransferReport
from trinamo.runtime.protocol.transfer.settlement import InquiryResult, PeerStatus, status_of

from ..services.memory.transfer import SimulatedTransfer
from .planting import Patch, bug


@bug
def transfers_hold_no_lease() -> list[Patch]:
    """Blocks of a transfer belong to whoever asked for it, and are free once that has given up."""
    return [(BlockLeases, "start", lambda _, start, *__: start())]


@bug
def withdrawal_frees_at_once() -> list[Patch]:
    """Blocks granted to a peer are used again as soon as we want no more, whatever it does."""
    withdraw = Grant.withdraw

    def careless(self: Any) -> None:
        self._needs_proof = False
        withdraw(self)

    return [(Grant, "withdraw", careless)]


@bug
def resumed_behind_the_confirmed() -> list[Patch]:
    """What was sent passes for confirmed, and the next backend goes on behind it."""
    return [(SimulatedTransfer, "confirmed_count", property(lambda self: self._next))]


@bug
def fallback_before_settled() -> list[Patch]:
    """The next backend moves the blocks while the last one may still write them."""

    async def hurry(_: Any, transfer: Any, *_rest: Any) -> None:
        transfer.abort()
        await trio.lowlevel.checkpoint()

    return [(TransferRouter, "_settle", hurry)]


@bug
def lost_peer_is_done() -> list[Patch]:
    """A transfer whose peer is gone passes for done."""
    attempt = TransferRouter._attempt  # noqa: SLF001 -- what is replaced

    async def hopeful(self: Any, route: Any, memory: Any, job: Any) -> TransferReport:
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

    return [(TransferRouter, "_attempt", hopeful)]


# --- engines that find each other -------------------------------------------------------------------


@bug
def missing_is_gone() -> list[Patch]:
    """A peer that the store does not name any more is forgotten, however well it answers."""

    async def silent(self: Any, incarnation: str) -> bool:  # noqa: ARG001 -- the method's parameters
        await trio.lowlevel.checkpoint()
        return False

    return [(EngineTransfers, "_answers", silent)]


@bug
def unregistered_is_nobody() -> list[Patch]:
    """A peer that is not in the store in the moment when it is looked for cannot be found."""

    async def hasty(self: Any, engine_id: str, **_: Any) -> NixlMetadata:
        found: NixlMetadata = await self.get(engine_id)
        return found

    return [(NixlMetadataStore, "find", hasty)]


@bug
def leaves_undrained() -> list[Patch]:
    """A process that leaves does not wait for the transfers of its blocks."""

    async def hasty(self: Any) -> None:
        self._is_draining = True
        await trio.lowlevel.checkpoint()

    return [(EngineTransfers, "drain", hasty)]


# --- blocks that a peer may still write ---------------------------------------------------------------


@bug
def nobody_asked() -> list[Patch]:
    """Whoever granted blocks waits for a word, which the dead do not say."""

    async def patient(self: Any, *_: Any, **__: Any) -> float:  # noqa: ARG001 -- the method's
        await trio.sleep_forever()
        raise AssertionError("sleeps for ever")

    return [(Path, "prove", patient)]


@bug
def missed_answer_is_death() -> list[Patch]:
    """A peer that cannot be reached, or does not answer, passes for dead."""

    def rash(result: InquiryResult, *, is_known: bool) -> PeerStatus:
        if result in (InquiryResult.SILENT, InquiryResult.UNREACHED):
            return PeerStatus.GONE
        return status_of(result, is_known=is_known)

    return [(settlement, "status_of", rash)]


@bug
def settled_while_moving() -> list[Patch]:
    """Asked for a ticket, a process says that nothing moves, without a look."""
    return [(Tickets, "is_settled", lambda *_: True)]
