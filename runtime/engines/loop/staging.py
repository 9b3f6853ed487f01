"""KV that an engine keeps in a place of its own, copied to and from the blocks round a step.

It runs in the hop, where the step runs, so the event loop does not wait for it and no step is under
way. `steps.py` says between which steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .scheduler import Work
from .step import StagesKv, StepItem

Step = Callable[[Sequence[StepItem]], list[int | None]]
_Copy = tuple[int, int, Sequence[int]]
"""Slot, tokens and block ids."""


def staged_step(engine: StagesKv, work: Sequence[Work]) -> Step:
    """The step of `engine` with what has to be copied before and after it.

    Before: the KV of sequences that were adopted and take part for the first time. After: that of
    prompts which a transfer is waiting for, once they are computed to their end.
    """
    loads: list[_Copy] = []
    saves: list[_Copy] = []
    for each in work:
        sequence = each.sequence
        if sequence.is_in_blocks_only:
            sequence.is_in_blocks_only = False
            # Preempted meanwhile, it is computed again.
            if sequence.cached_tokens:
                loads.append((sequence.slot, sequence.cached_tokens, tuple(sequence.block_ids)))
        if sequence.is_pinned and each.is_sampled:
            saves.append((sequence.slot, len(sequence.token_ids), tuple(sequence.block_ids)))

    def step(items: Sequence[StepItem]) -> list[int | None]:
        for load in loads:
            engine.load(*load)
        token_ids = engine.step(items)
        for save in saves:
            engine.save(*save)
        return token_ids

    return step if loads or saves else engine.step
