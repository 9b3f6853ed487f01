"""One token sequence on its way through the steps: what the scheduler moves about.

Sans-IO. Text, sink and context of the answer belong to `answer.py`.
"""

from __future__ import annotations

import enum

import attrs

from .step import Sampling, Shaping


class SequenceState(enum.Enum):
    """Where a sequence is; pausing and dying are flags beside it."""

    WAITING = "waiting"
    """In the queue, without blocks: new, or preempted."""
    RUNNING = "running"
    """Holds a slot and the blocks of all its known tokens."""
    GONE = "gone"
    """Holds nothing and never comes back."""


@attrs.define(eq=False, kw_only=True)
class TokenSequence:
    """Prompt and answer so far. Compared by identity."""

    token_ids: list[int]
    """Every known token: the prompt, then what was generated."""
    prompt_tokens: int
    tokens_max: int
    """Length at which the answer ends, the prompt included."""
    sampling: Sampling = attrs.Factory(Sampling)
    shaping: Shaping | None = None
    state: SequenceState = SequenceState.WAITING
    tenant: str = ""
    """Whose it is: nothing that it computes is found by others."""
    found_tokens: int | None = None
    """Of its prompt, how many were held already when it was first given a place."""
    cached_tokens: int = 0
    """The KV of so many leading tokens is in the blocks."""
    block_ids: list[int] = attrs.Factory(list)
    block_hashes: list[bytes] = attrs.Factory(list)
    """Of its first full blocks, as far as anybody has asked; they stay true when it is preempted."""
    stored_blocks: int = 0
    """So many of its first blocks others can find, or do not need to."""
    slot: int = -1
    """-1 unless running."""
    is_paused: bool = False
    """Its consumer is too slow: left out of the steps, and the first victim of a preemption."""
    is_pinned: bool = False
    """A transfer may touch its blocks: it is never preempted."""
    is_held: bool = False
    """Pinned and left out of the steps: its prompt is complete, or computed by somebody else."""
    is_in_blocks_only: bool = False
    """Adopted, and not yet where an engine that stages its KV computes with it."""
    is_dead: bool = False
    """Nobody wants another token: it is gone before the next step."""

    @property
    def pending_tokens(self) -> int:
        """Known tokens whose KV is still to be computed; 1 while decoding."""
        return len(self.token_ids) - self.cached_tokens

    @property
    def is_full(self) -> bool:
        """It has all the tokens it may have."""
        return len(self.token_ids) >= self.tokens_max
