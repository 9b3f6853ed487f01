"""Prepared lists: memory as NIXL wants it named, made once and kept.

A list covers a whole region as equal blocks, so a transfer only names indices. Called in the
progress thread only.
"""

from __future__ import annotations

from typing import Final

from trinamo.transports.one_sided.memory import Memory

from .agent import Agent

_LISTS_MAX: Final = 4096
"""Bitmaps of tickets are read at many places; beyond this the oldest list is dropped."""


_Key = tuple[tuple[int, ...], int, int, int]


class PreparedLists:
    """The lists over memory of one peer, or (None) of our own."""

    def __init__(self, agent: Agent, peer: str | None) -> None:
        self._agent, self._peer = agent, peer
        self._handles: dict[_Key, int] = {}

    @staticmethod
    def _key(memory: Memory, item_bytes: int) -> _Key:
        device = -1 if memory.device is None else memory.device
        return memory.addresses, memory.length, device, item_bytes

    def has(self, memory: Memory, item_bytes: int) -> bool:
        """Whether `over` would find it made already."""
        return self._key(memory, item_bytes) in self._handles

    def over(self, memory: Memory, item_bytes: int) -> int:
        """The list of all items of `memory`; `RemoteProtocolError` if it is not registered."""
        key = self._key(memory, item_bytes)
        found = self._handles.get(key)
        if found is None:
            if len(self._handles) >= _LISTS_MAX:
                self._agent.release_list(self._handles.pop(next(iter(self._handles))))
            found = self._agent.prepare(
                self._peer,
                memory,
                item_bytes=item_bytes,
                stride=item_bytes,
                count=memory.length // item_bytes,
            )
            self._handles[key] = found
        return found

    def release(self, within: Memory | None = None) -> None:
        """Let go of all lists, or of those that begin in one of these ranges."""
        for key in list(self._handles):
            if within is None or any(0 <= key[0][0] - a < within.length for a in within.addresses):
                self._agent.release_list(self._handles.pop(key))
