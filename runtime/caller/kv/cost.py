"""What it costs to send a request to an instance, and which instance that makes the choice: pure.

The formula, its names and its defaults are those of Dynamo's KV router (`scheduling/selector`); what
of it has no meaning here is left out: overlaps on hosts, disks and shared stores, and taints.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import attrs


@attrs.frozen(kw_only=True)
class Weights:
    """What counts how much; the keys of `router.kv`."""

    overlap_credit: float = 1.0
    """Blocks of prefill that a block held already saves."""
    overlap_credit_decay: float = 0.0
    """How much less it saves at an instance that has more prefill before it than the least."""
    prefill_load_scale: float = 1.0
    """What a block of prefill counts beside a block of decode."""
    active_request_weight: float = 0.0
    """Blocks that a request under way counts for, whatever its length."""
    temperature: float = 0.0
    """0 takes the cheapest; above, others are taken as well, the more the higher."""


@attrs.frozen
class Candidate:
    """One instance as it would be with the request. Loads are predicted, not reported."""

    overlap_blocks: int
    """Leading blocks of the request that it holds."""
    prefill_tokens: int
    """That it has still to compute for others."""
    decode_blocks: int
    """That sequences under way use, this one included, each block counted once."""
    active_requests: int


def costs(
    weights: Weights, candidates: Sequence[Candidate], *, tokens: int, block_tokens: int
) -> list[float]:
    """The cost of each candidate, in blocks, for a request of `tokens` tokens in blocks of `block_tokens`.

    `S · max(0, (waiting + tokens) / block - W · overlap · decay) + decode blocks + A · requests`
    with `decay = 1 / (1 + D · (waiting - least waiting) / tokens)`.
    """
    least = min((each.prefill_tokens for each in candidates), default=0)
    found = []
    for each in candidates:
        credit = weights.overlap_credit * each.overlap_blocks
        if weights.overlap_credit_decay and tokens:
            ahead = (each.prefill_tokens - least) / tokens
            credit /= 1 + weights.overlap_credit_decay * ahead
        prefill_blocks = (each.prefill_tokens + tokens) / block_tokens
        found.append(
            weights.prefill_load_scale * max(0.0, prefill_blocks - credit)
            + each.decode_blocks
            + weights.active_request_weight * each.active_requests
        )
    return found


def choose(found: Sequence[float], temperature: float, rng: random.Random) -> int:
    """Which of at least one cost is taken.

    At temperature 0 the least, any of those that are equal. Above, each with the weight
    `exp(-cost / (most - least) / temperature)`; if all are equal, any.
    """
    least, most = min(found), max(found)
    if temperature <= 0 or least == most:
        equal = [at for at, cost in enumerate(found) if cost == least]
        return equal[0] if len(equal) == 1 else equal[rng.randrange(len(equal))]
    scale = (most - least) * temperature
    weights = [math.exp((least - cost) / scale) for cost in found]
    return rng.choices(range(len(found)), weights)[0]
