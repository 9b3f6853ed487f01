"""What a penalty knows of a sequence: kept from step to step, and the same as if it was counted again."""

from __future__ import annotations

import numpy as np
import pytest

from trinamo.runtime.engines.loop.sampler import TokenCounts, reshape
from trinamo.runtime.protocol.openai.generate import GenerateRequest

VOCABULARY = 8


@pytest.mark.parametrize("steps", [[7], [3, 5, 7], [2, 4, 6, 7], [1, 1, 7]])
def test_counts_do_not_depend_on_when_they_are_taken(steps: list[int]) -> None:
    """The prompt is counted once, the answer as it grows, also by several tokens at once."""
    token_ids, prompt_tokens = [1, 2, 2, 5, 5, 6, 5], 3
    counts = TokenCounts(VOCABULARY)
    for known in steps:
        counts.follow(token_ids[:known], prompt_tokens)

    assert list(np.flatnonzero(counts.seen)) == [1, 2, 5, 6]
    assert counts.said.tolist() == [0, 0, 0, 0, 0, 3, 1, 0]


def test_penalties_are_those_of_openai_and_of_vllm() -> None:
    counts = TokenCounts(VOCABULARY)
    counts.follow([1, 2, 5, 5], 2)
    logits = np.array([1.0, 2.0, -2.0, 1.0, 1.0, 4.0, 1.0, 1.0])
    request = GenerateRequest(
        model="m",
        prompt="a",
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={7: 3.0, 99: 1.0},
    )
    reshape(logits, request, counts)

    # The prompt's tokens are divided, or multiplied where negative; the answer's lose 0.5 and 2 * 0.25, too.
    assert logits.tolist() == [1.0, 1.0, -4.0, 1.0, 1.0, 1.0, 1.0, 4.0]
