"""Where a prompt is computed: the whole table."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from trinamo.runtime.protocol.disaggregation.decision import (
    LOCAL_IF,
    PrefillReason,
    Situation,
    decide,
)

REMOTE = Situation(
    missing_tokens=1001, tokens_local_max=1000, has_prefill_worker=True, queue_depth_max=2
)
situations = st.builds(
    Situation,
    missing_tokens=st.integers(1, 20),
    tokens_local_max=st.integers(0, 20),
    wants_logprobs=st.booleans(),
    has_prefill_worker=st.booleans(),
    is_queue_reachable=st.booleans(),
    queue_depth=st.integers(0, 4),
    queue_depth_max=st.integers(1, 4),
    missing_blocks=st.integers(0, 4),
    lendable_blocks=st.integers(-2, 4),
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, PrefillReason.LONG_PROMPT),
        ({"wants_logprobs": True}, PrefillReason.LOGPROBS),
        ({"missing_tokens": 1000}, PrefillReason.SHORT_PROMPT),
        ({"tokens_local_max": 1001}, PrefillReason.SHORT_PROMPT),
        ({"has_prefill_worker": False}, PrefillReason.NO_PREFILL_WORKER),
        ({"is_queue_reachable": False}, PrefillReason.QUEUE_AWAY),
        ({"queue_depth": 1}, PrefillReason.LONG_PROMPT),
        ({"queue_depth": 2}, PrefillReason.QUEUE_FULL),
        ({"missing_blocks": 4, "lendable_blocks": 4}, PrefillReason.LONG_PROMPT),
        ({"missing_blocks": 5, "lendable_blocks": 4}, PrefillReason.POOL_LENT),
        ({"missing_tokens": 5, "queue_depth": 9}, PrefillReason.SHORT_PROMPT),
    ],
)
def test_each_line_of_the_table_decides(change: dict[str, Any], reason: PrefillReason) -> None:
    assert decide(attrs.evolve(REMOTE, **change)) is reason


@given(situations)
def test_a_prompt_goes_elsewhere_only_if_no_line_keeps_it_here(situation: Situation) -> None:
    """The reason is the first line that holds, and remote is what no line keeps."""
    kept = [reason for reason, holds in LOCAL_IF if holds(situation)]

    assert decide(situation) is (kept[0] if kept else PrefillReason.LONG_PROMPT)
    assert decide(situation).is_remote is not bool(kept)


@given(situations, st.integers(0, 20))
def test_a_longer_prompt_never_stays_where_a_shorter_one_went(
    situation: Situation, more: int
) -> None:
    longer = attrs.evolve(situation, missing_tokens=situation.missing_tokens + more)

    assert decide(longer).is_remote or not decide(situation).is_remote
