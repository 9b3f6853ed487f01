"""Which of llama.cpp's sequences is whose: one for each slot of the scheduler, and those of ended ones.

What a sequence computed stays when it has ended, for a prompt of the same tenant that begins alike.
A prompt that goes on behind all of it takes it over; cells may belong to several sequences, so one that
begins like a part of it shares them. Each step looks at the cells of everybody, so as soon as others run
only the one used last keeps its cells: what the others had is copied to memory beside them, and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import attrs

KEPT_MAX: Final = 64
"""Ended sequences; all their tokens together have room in the context, too."""
SEQUENCES_MAX: Final = 256
"""Of one context, as llama.cpp is compiled."""
_EVERY: Final = -1
"""All sequences, or up to the last position, in llama.cpp's calls on its KV memory."""


@attrs.define(eq=False)
class HeldSequence:
    """One of llama.cpp's sequences, and the tokens whose KV it has."""

    tenant: str = ""
    token_ids: list[int] = attrs.Factory(list)
    id: int = -1
    """-1 before it has one, and while it has no cells."""
    is_known: bool = True
    """Whether `token_ids` says it all: the KV of an adopted sequence came without its tokens."""
    state: bytes = b""
    """Its KV, while it has no cells."""


class Sequences:
    """The sequences of one context, for `running_max` slots. Between steps; `of` also within one."""

    def __init__(self, context: Any, running_max: int, tokens_max: int) -> None:
        """At most `tokens_max` tokens are kept of those that ended."""
        self._context = context
        self._tokens_max = tokens_max
        self._free = list(range(sequence_count(running_max)))
        self._running: dict[int, HeldSequence] = {}
        """By slot."""
        self._next: dict[int, HeldSequence] = {}
        """Of those begun, by slots whose last owners may not have been released yet."""
        self._kept: list[HeldSequence] = []
        """Of ended sequences, the one unused longest first."""

    def find(self, token_ids: Sequence[int], tenant: str) -> int:
        """How many leading tokens, but not all, some sequence of `tenant` has."""
        return self._longest(token_ids, tenant)[1]

    def begin(self, slot: int, token_ids: Sequence[int], tenant: str) -> int:
        """Give the next owner of `slot` what `find` finds; returns how many tokens that are."""
        held = self._next[slot] = HeldSequence(tenant)
        donor, count = self._longest(token_ids, tenant)
        if donor is None or (donor.id < 0 and not self._load(donor)):
            return 0
        if donor in self._kept:
            self._kept.remove(donor)
            if count == len(donor.token_ids):
                self._next[slot] = donor
                return count
            self._kept.append(donor)
        if not self._free:
            return 0
        held.id, held.token_ids = self._free.pop(), donor.token_ids[:count]
        self._context.memory_seq_cp(donor.id, held.id, 0, count)
        return count

    def of(self, slot: int) -> HeldSequence:
        """The sequence of `slot`, whose last owner has been released: a new one if nobody began it."""
        held = self._running.get(slot)
        if held is None:
            held = self._running[slot] = self._next.pop(slot, HeldSequence())
            self._put_away(self._kept[:-1])
            if held.id < 0:
                if not self._free:
                    self.drop_oldest()
                held.id = self._free.pop()
        return held

    def release(self, slot: int) -> None:
        """Its owner is gone: what it has stays for others, unless one that stays has as much."""
        held = self._running.pop(slot, None)
        if held is None:
            return
        if not (held.is_known and held.token_ids):
            self._take_cells(held)
            return
        for other in tuple(self._kept):
            begins = other.token_ids == held.token_ids[: len(other.token_ids)]
            if begins and other.tenant == held.tenant:
                self._drop(other)
        self._kept.append(held)
        while len(self._kept) > KEPT_MAX or self._kept_tokens > self._tokens_max:
            self._drop(self._kept[0])

    def drop_oldest(self) -> bool:
        """Free the cells and the number of the kept sequence unused longest; False if none has any."""
        oldest = next((held for held in self._kept if held.id >= 0), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def clear(self) -> None:
        """Nobody has anything: what a step that failed has written, nobody knows."""
        self._context.memory_seq_rm(_EVERY, _EVERY, _EVERY)
        for held in (*self._running.values(), *self._next.values(), *self._kept):
            if held.id >= 0:
                self._free.append(held.id)
        self._running.clear()
        self._next.clear()
        self._kept.clear()

    @property
    def _kept_tokens(self) -> int:
        return sum(len(held.token_ids) for held in self._kept)

    def _load(self, held: HeldSequence) -> bool:
        """Give a kept sequence its cells again, those of the others if need be; False if there are not enough."""
        for others in ([], self._kept):
            self._put_away(others)
            if self._free:
                with suppress(ValueError):
                    self._context.set_state_seq_data(held.state, self._free[-1])
                    held.id, held.state = self._free.pop(), b""
                    return True
        return False

    def _put_away(self, kept: list[HeldSequence]) -> None:
        for held in kept:
            if held.id >= 0:
                held.state = self._context.get_state_seq_data(held.id)
                self._take_cells(held)

    def _drop(self, held: HeldSequence) -> None:
        self._kept.remove(held)
        if held.id >= 0:
            self._take_cells(held)

    def _take_cells(self, held: HeldSequence) -> None:
        self._context.memory_seq_rm(held.id, _EVERY, _EVERY)
        self._free.append(held.id)
        held.id = -1

    def _longest(self, token_ids: Sequence[int], tenant: str) -> tuple[HeldSequence | None, int]:
        longest, most = None, 0
        # `_next` are copies of what is here, or goes on behind it.
        for held in (*self._kept, *self._running.values()):
            if held.is_known and held.tenant == tenant:
                count = _common(token_ids, held.token_ids, most)
                if count > most:
                    longest, most = held, count
        return longest, most


def sequence_count(running_max: int) -> int:
    """How many a context for so many slots has; `ValueError` if those are too many."""
    if running_max > SEQUENCES_MAX:
        raise ValueError(
            f"running_max is {running_max}; llama.cpp has at most {SEQUENCES_MAX} sequences"
        )
    # All may end, and be kept, before as many begin.
    return min(2 * running_max + 1, SEQUENCES_MAX)


def _common(token_ids: Sequence[int], held: Sequence[int], least: int) -> int:
    """How many leading tokens both have, at most all but the last of `token_ids`; 0 if not over `least`."""
    low, high = least + 1, min(len(token_ids) - 1, len(held))
    if low > high or token_ids[:low] != held[:low]:
        return 0
    pairs = zip(token_ids[low:high], held[low:high], strict=True)
    return next((low + at for at, (mine, its) in enumerate(pairs) if mine != its), high)
