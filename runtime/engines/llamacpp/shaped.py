"""The next token of a sequence whose request asks for more than llama.cpp's own chain of samplers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt
import trio
from llguidance import LLMatcher

from ...errors import EngineError, RequestError
from ...protocol.openai.generate import GenerateRequest, TokenLogprob
from ..loop.step import Sampling, Shaping, StepItem
from .grammars import Compiler, Grammar, grammar_of
from .sandbox.sandbox import ExceededError, Sandbox

_CACHED_MAX: Final = 64


class Grammars:
    """The grammars that were asked for last, `_CACHED_MAX` of them, and why others are none."""

    def __init__(self, compiler: Compiler, sandbox: Sandbox) -> None:
        self._compiler, self._sandbox = compiler, sandbox
        self._made: OrderedDict[str, LLMatcher | str] = OrderedDict()

    async def prepare(self, source: str, param: str) -> None:
        """Have the grammar ready for `open`; `RequestError` naming `param` if `source` is none.

        It is made in the sandbox first, as what one costs is not to be seen in its text.
        """
        found = self._made.get(source)
        if found is None:
            try:
                found = await self._sandbox.call(source)
            except ExceededError as error:
                found = f"making it takes more than {error}"
            found = found or await trio.to_thread.run_sync(self._compiler.compile, source)
            self._made[source] = found
            while len(self._made) > _CACHED_MAX:
                self._made.popitem(last=False)
        if isinstance(found, str):
            raise RequestError(f"'{param}' cannot be a grammar: {found}", param=param)

    def open(self, source: str) -> Grammar:
        """A grammar at its beginning, whose source was prepared; `EngineError` otherwise."""
        found = self._made.get(source) or self._compiler.compile(source)
        if isinstance(found, str):
            raise EngineError(f"the answer has no grammar: {found}")
        return self._compiler.open(found)


@attrs.frozen(eq=False)
class _State:
    """What a sequence keeps between two tokens; made anew from its tokens wherever it goes on."""

    grammar: Grammar | None


class ShapedSampling:
    """Chooses by the logits in Python; about three milliseconds a token of a vocabulary of 49,152.

    `plain` is how a token is chosen without it: where a request only asks what was likely, the
    answer is the same.
    """

    def __init__(
        self,
        grammars: Grammars,
        token_bytes: Callable[[int], bytes],
        plain: Callable[[int, StepItem], int],
    ) -> None:
        self._grammars = grammars
        self._token_bytes = token_bytes
        self._plain = plain

    async def prepare(self, request: GenerateRequest) -> None:
        """Have the answer's grammar ready; `RequestError` if it cannot be made."""
        source, param = grammar_of(request)
        if source:
            await self._grammars.prepare(source, param)

    def sample(self, found: list[float], row: int, item: StepItem) -> int | None:
        """The next token by the logits `found`; None, and why in `shaping.failure`, if none can be."""
        shaping = item.shaping
        assert shaping is not None, "nothing is asked for beyond the sampling"
        logits = np.array(found, np.float32)
        try:
            token_id = self._choose(logits, row, item, shaping)
        except EngineError as error:
            shaping.failure = error
            return None
        count = shaping.request.logprobs
        if count is not None:
            shaping.told = tell(logits, token_id, count, self._token_bytes)
        return token_id

    def _choose(self, logits: Any, row: int, item: StepItem, shaping: Shaping) -> int:
        request = shaping.request
        if shaping.state is None:
            source, _ = grammar_of(request)
            shaping.state = _State(self._grammars.open(source) if source else None)
        grammar = shaping.state.grammar
        if grammar is None and not (is_reshaped(request) or request.top_k or request.min_p):
            return self._plain(row, item)
        shaped = logits.copy()
        answer_ids = shaping.token_ids[shaping.prompt_tokens :]
        reshape(shaped, request, shaping.token_ids[: shaping.prompt_tokens], answer_ids)
        if grammar is not None:
            grammar.follow(answer_ids)
            shaped[~grammar.allowed()] = -np.inf
            if np.isneginf(shaped).all():
                raise EngineError("the grammar of the answer allows no token of the vocabulary")
        position = item.position + len(item.token_ids)
        return choose(shaped, item.sampling, position, top_k=request.top_k, min_p=request.min_p)


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
