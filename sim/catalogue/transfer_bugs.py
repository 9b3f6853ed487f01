"""Mistakes in the life of KV blocks and of what moves them; see `bugs.py`."""

from __future__ import annotations

from typing import Any

import trio

from trinamo.runtime.errors import DisconnectedError
from trinamo.runtime.kv import BlockLeases, TransferRouter
from trinamo.runtime.kv.transfers import Grant

from ..services.memory_transfer import SimulatedTransfer
from .planting import Patch, bug

__all__: list[str] = []


@bug
def transfers_hold_no_lease() -> list[Patch]:
    """Blocks of a transfer belong to whoever asked for it, and are free once that has given up."""
    return [(BlockLeases, "follow", lambda *_: None)]


@bug
def withdrawal_frees_at_once() -> list[Patch]:
    """Blocks granted to a peer are used again as soon as we want no more, whatever it does."""

    def withdraw(self: Any) -> None:
        self._settled.set()
        self._end()

    return [(Grant, "withdraw", withdraw)]


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

    async def hopeful(self: Any, *args: Any) -> Any:
        try:
            return await attempt(self, *args)
        except DisconnectedError:
            return None

    return [(TransferRouter, "_attempt", hopeful)]
