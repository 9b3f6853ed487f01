"""The next token from a row of logits, where more than temperature and `top_p` chooses it. Sans-IO.

The order is that of vLLM: biases, penalties, what a grammar allows, temperature, `top_k`, `top_p`,
`min_p`. A presence or frequency penalty looks at the answer so far (OpenAI's formula), the repetition
penalty at the prompt too (Keskar et al., "CTRL", 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...protocol.openai.generate import GenerateRequest, TokenLogprob
from ..loop.step import Sampling

Array = npt.NDArray[Any]
LOGPROB_MIN: Final = -9999.0
"""What JSON has in place of an infinite one, as OpenAI writes it."""
_DRAWS: Final = float(1 << 64)


def is_reshaped(request: GenerateRequest) -> bool:
    """Whether logits are changed before anything is drawn."""
    return bool(
        request.logit_bias
        or request.presence_penalty
        or request.frequency_penalty
        or request.repetition_penalty != 1
    )


def reshape(
    logits: Array, request: GenerateRequest, prompt_ids: Sequence[int], answer_ids: Sequence[int]
) -> None:
    """Change `logits`, one for each token of the vocabulary, by biases and penalties, in place.

    A bias for what is no token changes nothing.
    """
    for token_id, bias in request.logit_bias.items():
        if token_id < len(logits):
            logits[token_id] += bias
    if request.repetition_penalty != 1:
        seen = np.unique(np.asarray([*prompt_ids, *answer_ids], np.int64))
        found, penalty = logits[seen], request.repetition_penalty
        logits[seen] = np.where(found > 0, found / penalty, found * penalty)
    if request.presence_penalty or request.frequency_penalty:
        said, counts = np.unique(np.asarray(answer_ids, np.int64), return_counts=True)
        logits[said] -= request.presence_penalty + request.frequency_penalty * counts


def choose(
    logits: Array, sampling: Sampling, position: int, *, top_k: int = 0, min_p: float = 0.0
) -> int:
    """The token at `position`: of equal ones the first, at temperature 0 the likeliest.

    Tokens of minus infinity are never chosen; one must be another.
    """
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    # Stable, so that equal logits have one order wherever this is computed.
    order = np.argsort(-logits, kind="stable")
    if 0 < top_k < len(order):
        order = order[:top_k]
    kept = logits[order].astype(np.float64) / sampling.temperature
    weights = np.exp(kept - kept[0])
    weights /= weights.sum()
    if sampling.top_p < 1:
        # The fewest whose sum reaches `top_p`.
        weights = weights[: int(np.searchsorted(np.cumsum(weights), sampling.top_p)) + 1]
    if min_p > 0:
        weights = weights[weights >= min_p * weights[0]]
    sums = np.cumsum(weights)
    drawn = sampling.draw(position) / _DRAWS * sums[-1]
    return int(order[min(int(np.searchsorted(sums, drawn, side="right")), len(sums) - 1)])


def tell(
    logits: Array, token_id: int, count: int, token_bytes: Callable[[int], bytes]
) -> TokenLogprob:
    """How likely the model found `token_id`, and the `count` likeliest: at temperature 1, all else aside."""
    exact = logits.astype(np.float64)
    top = exact.max()
    total = top + np.log(np.exp(exact - top).sum())

    def logprob(each: int) -> float:
        return max(float(exact[each] - total), LOGPROB_MIN)

    likeliest: list[int] = []
    if count:
        found = np.argpartition(-exact, min(count, len(exact) - 1))[:count]
        likeliest = [int(each) for each in found[np.argsort(-exact[found], kind="stable")]]
    return TokenLogprob(
        token_bytes(token_id),
        logprob(token_id),
        [(token_bytes(each), logprob(each)) for each in likeliest],
    )
