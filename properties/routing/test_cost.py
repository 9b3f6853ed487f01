"""The cost of a choice is the published formula, and the choice follows its costs."""

from __future__ import annotations

import math
import random
from collections import Counter

from hypothesis import given, strategies as st

from trinamo.runtime.caller.kv.cost import Candidate, Weights, choose, costs

WEIGHT = st.floats(0, 10)
WEIGHTS = st.builds(
    Weights,
    overlap_credit=WEIGHT,
    overlap_credit_decay=st.just(0.0) | WEIGHT,
    prefill_load_scale=WEIGHT,
    active_request_weight=WEIGHT,
)
CANDIDATE = st.builds(
    Candidate,
    st.integers(0, 300),
    st.integers(0, 50_000),
    st.integers(0, 5000),
    st.integers(0, 64),
)


def plain(weights: Weights, one: Candidate, least: int, tokens: int, block_size: int) -> float:
    """The formula word for word, as `docs/kv_routing.md` states it."""
    raw_prefill_blocks = (one.prefill_tokens + tokens) / block_size
    decay = 1.0
    if weights.overlap_credit_decay > 0:
        request_blocks = tokens / block_size
        ahead = (one.prefill_tokens - least) / block_size
        decay = 1 / (1 + weights.overlap_credit_decay * ahead / request_blocks)
    credit = weights.overlap_credit * decay * one.overlap_blocks
    return (
        weights.prefill_load_scale * max(0, raw_prefill_blocks - credit)
        + one.decode_blocks
        + weights.active_request_weight * one.active_requests
    )


@given(
    WEIGHTS,
    st.lists(CANDIDATE, min_size=1, max_size=8),
    st.integers(1, 40_000),
    st.sampled_from([1, 16, 64]),
)
def test_the_cost_is_the_formula(
    weights: Weights, candidates: list[Candidate], tokens: int, block_tokens: int
) -> None:
    """For every weight, load and length: equal to the formula stated plainly, up to rounding."""
    least = min(each.prefill_tokens for each in candidates)
    found = costs(weights, candidates, tokens=tokens, block_tokens=block_tokens)
    for candidate, cost in zip(candidates, found, strict=True):
        expected = plain(weights, candidate, least, tokens, block_tokens)
        assert math.isclose(cost, expected, rel_tol=1e-9, abs_tol=1e-6)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8), st.integers(0, 2**32))
def test_without_temperature_nothing_dearer_than_the_cheapest_is_taken(
    found: list[float], seed: int
) -> None:
    """At temperature 0 the chosen cost is the least."""
    assert found[choose(found, 0, random.Random(seed))] == min(found)


@given(st.integers(2, 6), st.integers(0, 2**32))
def test_among_equals_all_are_taken(count: int, seed: int) -> None:
    """Whatever the temperature, equal costs share the requests about equally."""
    for temperature in (0.0, 1.0):
        rng = random.Random(seed)
        taken = Counter(choose([7.0] * count, temperature, rng) for _ in range(100 * count))
        assert min(taken[at] for at in range(count)) > 40


def test_with_temperature_the_odds_are_those_of_the_softmax() -> None:
    """Costs 0, 1 and 2 at temperature 1/2: odds of 1, exp(-1) and exp(-2)."""
    rng = random.Random(5)
    taken = Counter(choose([0.0, 1.0, 2.0], 0.5, rng) for _ in range(30_000))
    total = 1 + math.exp(-1) + math.exp(-2)
    for at in range(3):
        assert math.isclose(taken[at] / 30_000, math.exp(-at) / total, abs_tol=0.01)
