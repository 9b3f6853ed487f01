"""The next token of a sequence whose request asks for more than an engine's own way to choose one.

One for all engines that have logits: biases, penalties, forms, and what is told of tokens. Needs
numpy, so nobody imports it but they.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from ...errors import EngineError
from ...protocol.openai.generate import GenerateRequest, TokenLogprob
from .step import Sampling, Shaping, StepItem

Array = npt.NDArray[Any]
LOGPROB_MIN: Final = -9999.0
"""What JSON has in place of an infinite one, as OpenAI writes it."""
_DRAWS: Final = float(1 << 64)


class Form(Protocol):
    """Where one answer is in what it may look like: a grammar's place."""

    def follow(self, answer_ids: Sequence[int]) -> None:
        """Take what is new of the whole answer so far; `EngineError` if the form has no such text."""
        ...

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may be next, the ends of an answer among them; `EngineError` if none can."""
        ...


class Sampler:
    """Chooses by logits, one for each token of the vocabulary, and tells of what was chosen.

    For one of 49,152 it takes about three milliseconds a token. `open_form` is the form of an answer at
    its beginning, None for one that is free; `EngineError` if there is none.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        open_form: Callable[[GenerateRequest], Form | None] = lambda _: None,
    ) -> None:
        self._token_bytes = token_bytes
        self._open_form = open_form

    def sample(self, logits: Array, item: StepItem, plain: Callable[[], int]) -> int | None:
        """The next token of `item`; None, and why in `shaping.failure`, if none can be.

        `plain` is how the engine chooses without this: where a request only asks what was likely, the
        answer is the same.
        """
        shaping = item.shaping
        assert shaping is not None, "nothing is asked for beyond the sampling"
        try:
            shaped = self._shaped(logits, item, shaping)
        except EngineError as error:
            shaping.failure = error
            return None
        token_id = plain() if shaped is None else choose(shaped, item.sampling, item.end)
        count = shaping.request.logprobs
        if count is not None:
            shaping.told = tell(logits, token_id, count, self._token_bytes)
        return token_id

    def _shaped(self, logits: Array, item: StepItem, shaping: Shaping) -> Array | None:
        """What to choose by, a copy; None if it is not to be changed."""
        request = shaping.request
        if shaping.state is None:
            # Made anew from the tokens wherever the sequence goes on.
            shaping.state = self._open_form(request)
        form: Form | None = shaping.state
        is_reshaped = (
            request.logit_bias
            or request.presence_penalty
            or request.frequency_penalty
            or request.repetition_penalty != 1
        )
        if form is None and not is_reshaped:
            return None
        shaped = logits.copy()
        if is_reshaped:
            if shaping.counts is None:
                shaping.counts = TokenCounts(len(logits))
            shaping.counts.follow(shaping.token_ids, shaping.prompt_tokens)
            reshape(shaped, request, shaping.counts)
        if form is not None:
            form.follow(shaping.token_ids[shaping.prompt_tokens :])
            shaped[~form.allowed()] = -np.inf
            if np.isneginf(shaped).all():
                raise EngineError("the grammar of the answer allows no token of the vocabulary")
        bar(shaped, item.barred)
        return shaped

    def tell_prompt(self, logits_at: Callable[[int], Array], item: StepItem) -> None:
        """Tell of the prompt's tokens before which `item` was computed; `logits_at` is of its rows.

        Whatever of them was told before, by a sequence that is computed again, stays.
        """
        shaping = item.shaping
        assert shaping is not None, "nothing is asked for beyond the sampling"
        told, count = shaping.prompt_told, shaping.request.prompt_logprobs
        assert told is not None, "nobody asks for the prompt's"
        assert count is not None, "nobody asks for the prompt's"
        if not told:
            # Nothing comes before it.
            told.append(TokenLogprob(self._token_bytes(shaping.token_ids[0]), 0.0))
        for position in range(len(told), min(item.end + 1, shaping.prompt_tokens)):
            logits, token_id = logits_at(position - 1 - item.position), shaping.token_ids[position]
            told.append(tell(logits, token_id, count, self._token_bytes))


class TokenCounts:
    """Which tokens one sequence has had, and how often its answer has each.

    Kept up from step to step, so that a step reads the tokens that are new, and not the whole
    sequence between the tokens of all others.
    """

    def __init__(self, vocabulary: int) -> None:
        self.seen = np.zeros(vocabulary, np.bool_)
        """Of the prompt and of the answer."""
        self.said = np.zeros(vocabulary, np.int32)
        """Of the answer."""
        self._read = 0

    def follow(self, token_ids: Sequence[int], prompt_tokens: int) -> None:
        """Count what is new of `token_ids`, the whole sequence, which begins with its prompt."""
        new = np.asarray(token_ids[self._read :], np.int64)
        self.seen[new] = True
        np.add.at(self.said, new[max(prompt_tokens - self._read, 0) :], 1)
        self._read = len(token_ids)


def reshape(logits: Array, request: GenerateRequest, counts: TokenCounts) -> None:
    """Change `logits`, one for each token of the vocabulary, by biases and penalties, in place.

    A bias for what is no token changes nothing.
    """
    for token_id, bias in request.logit_bias.items():
        if token_id < len(logits):
            logits[token_id] += bias
    if request.repetition_penalty != 1:
        seen = counts.seen
        found, penalty = logits[seen], request.repetition_penalty
        logits[seen] = np.where(found > 0, found / penalty, found * penalty)
    if request.presence_penalty or request.frequency_penalty:
        said = counts.said > 0
        logits[said] -= request.presence_penalty + request.frequency_penalty * counts.said[said]


def bar(logits: Array, barred: Sequence[int]) -> None:
    """Have none of `barred` chosen, in place, unless no other token could be: a form is complete."""
    if not barred:
        return
    ids = [each for each in barred if each < len(logits)]
    kept = logits[ids]
    logits[ids] = -np.inf
    if np.isneginf(logits).all():
        logits[ids] = kept


def choose(logits: Array, sampling: Sampling, position: int) -> int:
    """The token at `position`: of equal ones the first, at temperature 0 the likeliest.

    Tokens of minus infinity are never chosen; one must be another.
    """
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    # Stable, so that equal logits have one order wherever this is computed.
    order = np.argsort(-logits, kind="stable")
    if 0 < sampling.top_k < len(order):
        order = order[: sampling.top_k]
    kept = logits[order].astype(np.float64) / sampling.temperature
    weights = np.exp(kept - kept[0])
    weights /= weights.sum()
    if sampling.top_p < 1:
        # The fewest whose sum reaches `top_p`.
        weights = weights[: int(np.searchsorted(np.cumsum(weights), sampling.top_p)) + 1]
    if sampling.min_p > 0:
        weights = weights[weights >= sampling.min_p * weights[0]]
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
