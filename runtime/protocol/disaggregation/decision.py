"""Where the prompt of one request is computed: a table, read from the top by the decode worker.

Sans-IO. `LOCAL_IF` is the rule; the first line that holds says why the prompt is computed where the
answer is. A prompt to which none applies is computed by a prefill worker. What became of that is a
`PrefillReason`, too, so that each request is counted once: where its prompt was computed, and why.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final

import attrs


class PrefillReason(enum.StrEnum):
    """Why a prompt was computed here or elsewhere; the label `reason` of the metrics."""

    LONG_PROMPT = "long_prompt"
    """Computed by a prefill worker: it is long, and all others are free to go on with decoding."""
    LOGPROBS = "logprobs"
    """The log probabilities of the first token or of the prompt are asked for, and no prefill worker
    tells them."""
    SHORT_PROMPT = "short_prompt"
    """Too little is left to compute to be worth a transfer."""
    NO_PREFILL_WORKER = "no_prefill_worker"
    """None that fits these weights is live."""
    QUEUE_AWAY = "queue_away"
    """The broker of the queue cannot be reached, so nobody would hear of it."""
    QUEUE_FULL = "queue_full"
    """As many prompts as may wait for a prefill worker do."""
    POOL_LENT = "pool_lent"
    """As much of the pool as may be is lent to prefill workers, or in quarantine because of them."""
    NOT_CLAIMED = "not_claimed"
    """It was asked for, and nobody began with it in time."""
    REFUSED = "refused"
    """The prefill worker that was asked said no."""
    PREFILL_LOST = "prefill_lost"
    """The prefill worker went away, or gave up, before all blocks had arrived."""
    TRANSFER_FAILED = "transfer_failed"
    """The blocks could not be moved, or were not what was agreed on."""
    TIMED_OUT = "timed_out"
    """It took longer than `disaggregation.prefill_timeout_s`."""
    STOPPED = "stopped"
    """The request was stopped meanwhile: nobody computes its prompt."""

    @property
    def is_remote(self) -> bool:
        """Whether a prefill worker is to compute it, or has."""
        return self is PrefillReason.LONG_PROMPT


@attrs.frozen(kw_only=True)
class Situation:
    """All that the decision depends on."""

    wants_logprobs: bool = False
    missing_tokens: int
    """Of the prompt, those whose KV the decode worker does not hold."""
    tokens_local_max: int
    """So many are computed where the answer is."""
    has_prefill_worker: bool
    is_queue_reachable: bool = True
    queue_depth: int = 0
    """Prompts that wait for a prefill worker, as far as is known here."""
    queue_depth_max: int
    missing_blocks: int = 0
    """Those of the prompt that would have to come."""
    lendable_blocks: int = 0
    """So many more of the pool may be lent now."""


LOCAL_IF: Final[tuple[tuple[PrefillReason, Callable[[Situation], bool]], ...]] = (
    (PrefillReason.LOGPROBS, lambda s: s.wants_logprobs),
    (PrefillReason.SHORT_PROMPT, lambda s: s.missing_tokens <= s.tokens_local_max),
    (PrefillReason.NO_PREFILL_WORKER, lambda s: not s.has_prefill_worker),
    (PrefillReason.QUEUE_AWAY, lambda s: not s.is_queue_reachable),
    (PrefillReason.QUEUE_FULL, lambda s: s.queue_depth >= s.queue_depth_max),
    (PrefillReason.POOL_LENT, lambda s: s.missing_blocks > s.lendable_blocks),
)
"""The reasons to compute a prompt where its answer is, the first that holds first."""


def decide(situation: Situation) -> PrefillReason:
    """The first reason of `LOCAL_IF` that holds, or `LONG_PROMPT`."""
    return next(
        (reason for reason, holds in LOCAL_IF if holds(situation)), PrefillReason.LONG_PROMPT
    )
