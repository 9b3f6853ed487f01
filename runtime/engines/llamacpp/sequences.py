"""Which of llama.cpp's sequences is whose: one for each slot of the scheduler, and those of ended ones.

What a sequence computed stays in its cells when it has ended, for a prompt of the same tenant that
begins alike: cells may belong to several sequences, so a copy takes no room and no time. With those
that run there are `HELD_MAX`, as each step of those looks at the cells of all; the one unused longest
goes first, and when cells run out, before anybody who runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

HELD_MAX: Final = 16
"""Sequences that have tokens, unless more than that run."""
SEQUENCES_MAX: Final = 256
"""Of one context, as llama.cpp is compiled."""
_EVERY: Final = -1
"""All sequences, or up to the last position, in llama.cpp's calls on its KV memory."""


@attrs.define(eq=False)
class Held:
    """One of llama.cpp's sequences, and the tokens whose KV it has."""

    tenant: str = ""
    token_ids: list[int] = attrs.Factory(list)
    id: int = -1
    """-1 before it has one."""
    is_known: bool = True
    """Whether `token_ids` says it all: the KV of an adopted sequence came without its tokens."""


class Sequences:
    """The sequences of one context, for `running_max` slots. Between steps, and in their thread."""

    def __init__(self, context: Any, running_max: int) -> None:
        self._context = context
        self._free = list(range(sequence_count(running_max)))
        self._running: dict[int, Held] = {}
        """By slot."""
        self._next: dict[int, Held] = {}
        """Of those begun, by slots whose last owners may not have been released yet."""
        self._kept: list[Held] = []
        """Of ended sequences, the one unused longest first."""

    def find(self, token_ids: Sequence[int], tenant: str) -> int:
        """How many leading tokens, but not all, some sequence of `tenant` has."""
        return self._longest(token_ids, tenant)[1]

    def begin(self, slot: int, token_ids: Sequence[int], tenant: str) -> int:
        """Give the next owner of `slot` what `find` finds; returns how many tokens that are."""
        held = self._next[slot] = Held(tenant)
        donor, count = self._longest(token_ids, tenant)
        if donor is None:
            return 0
        if donor in self._kept:
            self._kept.remove(donor)
            self._kept.append(donor)
        if not self._free and not (len(self._kept) > 1 and self.drop_oldest()):
            return 0
        held.id, held.token_ids = self._free.pop(), donor.token_ids[:count]
        self._context.memory_seq_cp(donor.id, held.id, 0, count)
        return count

    def of(self, slot: int) -> Held:
        """The sequence of `slot`, whose last owner has been released: a new one if nobody began it."""
        held = self._running.get(slot)
        if held is None:
            held = self._running[slot] = self._next.pop(slot, Held())
            if held.id < 0:
                if not self._free:
                    self.drop_oldest()
                held.id = self._free.pop()
            self._trim()
        return held

    def release(self, slot: int) -> None:
        """Its owner is gone: what it has stays for others, unless one that stays has as much."""
        held = self._running.pop(slot, None)
        if held is None:
            return
        if not (held.is_known and held.token_ids):
            self._drop(held)
            return
        for other in tuple(self._kept):
            begins = other.token_ids == held.token_ids[: len(other.token_ids)]
            if begins and other.tenant == held.tenant:
                self._kept.remove(other)
                self._drop(other)
        self._kept.append(held)
        self._trim()

    def _trim(self) -> None:
        while self._kept and len(self._kept) + len(self._running) > HELD_MAX:
            self.drop_oldest()

    def drop_oldest(self) -> bool:
        """Free the cells and the number of the kept sequence unused longest; False if there is none."""
        if not self._kept:
            return False
        self._drop(self._kept.pop(0))
        return True

    def clear(self) -> None:
        """Nobody has anything: what a step that failed has written, nobody knows."""
        self._context.memory_seq_rm(_EVERY, _EVERY, _EVERY)
        for held in (*self._running.values(), *self._next.values(), *self._kept):
            if held.id >= 0:
                self._free.append(held.id)
        self._running.clear()
        self._next.clear()
        self._kept.clear()

    def _drop(self, held: Held) -> None:
        self._context.memory_seq_rm(held.id, _EVERY, _EVERY)
        self._free.append(held.id)

    def _longest(self, token_ids: Sequence[int], tenant: str) -> tuple[Held | None, int]:
        longest, most = None, 0
        # `_next` are copies of what is here.
        for held in (*self._kept, *self._running.values()):
            if held.is_known and held.tenant == tenant:
                count = _common(token_ids, held.token_ids, most)
                if count > most:
                    longest, most = held, count
        return longest, most


def sequence_count(running_max: int) -> int:
    """How many a context for so many slots has."""
    return max(running_max, min(running_max + HELD_MAX, SEQUENCES_MAX))


def _common(token_ids: Sequence[int], held: Sequence[int], least: int) -> int:
    """How many leading tokens both have, at most all but the last of `token_ids`; 0 if not over `least`."""
    low, high = least + 1, min(len(token_ids) - 1, len(held))
    if low > high or token_ids[:low] != held[:low]:
        return 0
    pairs = zip(token_ids[low:high], held[low:high], strict=True)
    return next((low + at for at, (mine, its) in enumerate(pairs) if mine != its), high)
