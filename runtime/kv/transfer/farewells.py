"""Whether a peer that discovery does not name any more is gone, or has only lost its lease.

A store that was away for longer than the lease takes everybody's keys with it, though everybody
lives. So whoever is missing is asked itself. `engine.py` knows the peers.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import trio

__all__ = ["Farewells"]

_log = logging.getLogger("trinamo.transfer")
_LOOK_S: Final = 0.2

Ask = Callable[[str], Awaitable[bool]]


class Farewells:
    """Sees off the lives of peers, each known by its `agent_name`, one task a life.

    While `answers` says that it does, it is kept, until `is_named` says that discovery names it
    again, or `grace_s` seconds are over. Otherwise `forget` is called. All three must be bounded.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        *,
        grace_s: float,
        answers: Ask,
        is_named: Ask,
        forget: Callable[[str], Awaitable[None]],
    ) -> None:
        self._nursery = nursery
        self._grace_s = grace_s
        self._answers, self._is_named, self._forget = answers, is_named, forget
        self._missing: dict[str, int] = {}
        """How often each life was said to be missing since its task began."""

    async def begin(self, agent_name: str) -> None:
        """This life is missing; does not wait for what comes of it."""
        await trio.lowlevel.checkpoint()
        count = self._missing[agent_name] = self._missing.get(agent_name, 0) + 1
        if count == 1:
            self._nursery.start_soon(self._see_off, agent_name)

    async def _see_off(self, agent_name: str) -> None:
        try:
            ends_at = trio.current_time() + self._grace_s
            wait_s = _LOOK_S
            while trio.current_time() < ends_at and await self._answers(agent_name):
                await trio.sleep(min(wait_s, max(0.0, ends_at - trio.current_time())))
                wait_s *= 2  # After an outage everybody asks about everybody.
                count = self._missing[agent_name]
                # News that came while we asked is younger than the answer may be.
                if await self._is_named(agent_name) and self._missing[agent_name] == count:
                    _log.info("peer %s is in discovery again; nothing was lost", agent_name)
                    return
        finally:
            del self._missing[agent_name]
        await self._forget(agent_name)
