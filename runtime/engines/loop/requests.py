"""From a request to the sequence that the step loop computes, with everything checked."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ...errors import RequestError
from ...protocol.openai.generate import GenerateRequest, check_features, is_shaped
from ..prompts import check_prompt_fits
from ..text import TextStream
from .sequence import TokenSequence
from .step import Sampling, Shaping, StepEngine

SEED_BITS = 64


def known_tokens(engine: StepEngine, request: GenerateRequest) -> tuple[list[int], int]:
    """The tokens of the prompt, then those delivered, and how many are the prompt's.

    Raises `RequestError` if they are none the engine can take.
    """
    check_features(request, engine.info.features)
    context_tokens_max = engine.info.context_tokens_max
    token_ids = engine.encode(request)
    prompt_tokens = len(token_ids)
    check_prompt_fits(prompt_tokens, context_tokens_max)
    if request.delivered_ids:
        # The engine alone knows what is a token.
        delivered = GenerateRequest(model=request.model, token_ids=request.delivered_ids)
        token_ids += engine.encode(delivered)
        tokens_max = _tokens_max(engine, request, prompt_tokens)
        if len(token_ids) > tokens_max:
            raise RequestError(
                f"{len(request.delivered_ids)} tokens are delivered already, but the answer has"
                f" {tokens_max - prompt_tokens} at most",
                param="delivered_ids",
            )
    return token_ids, prompt_tokens


def text_behind(engine: StepEngine, request: GenerateRequest) -> TextStream:
    """The text of the answer from here on: what was delivered is shown already."""
    text = TextStream(request.stop)
    for token_id in request.delivered_ids:
        text.push(engine.token_bytes(token_id))
    return text


def ends_with(engine: StepEngine, delivered_ids: Sequence[int]) -> bool:
    """Whether the last of these tokens ends an answer."""
    return bool(delivered_ids) and delivered_ids[-1] in engine.end_token_ids


def is_answered(engine: StepEngine, request: GenerateRequest, prompt_tokens: int) -> bool:
    """Whether all of the answer was delivered but its end."""
    delivered = request.delivered_ids
    if not delivered:
        return False
    is_full = prompt_tokens + len(delivered) >= _tokens_max(engine, request, prompt_tokens)
    return is_full or ends_with(engine, delivered) or text_behind(engine, request).is_stopped


def sequence_of(engine: StepEngine, request: GenerateRequest, rng: random.Random) -> TokenSequence:
    """A new sequence; `rng` draws a seed where the request has none. Raises `RequestError`."""
    token_ids, prompt_tokens = known_tokens(engine, request)
    seed = rng.getrandbits(SEED_BITS) if request.seed is None else request.seed
    shaping = None
    if is_shaped(request):
        shaping = Shaping(request=request, token_ids=token_ids, prompt_tokens=prompt_tokens)
    return TokenSequence(
        token_ids=token_ids,
        prompt_tokens=prompt_tokens,
        tokens_max=_tokens_max(engine, request, prompt_tokens),
        sampling=Sampling(
            temperature=request.temperature,
            top_p=request.top_p,
            seed=seed % (1 << SEED_BITS),
        ),
        shaping=shaping,
        tenant=request.tenant,
    )


def _tokens_max(engine: StepEngine, request: GenerateRequest, prompt_tokens: int) -> int:
    context_tokens_max = engine.info.context_tokens_max
    wanted = context_tokens_max if request.max_tokens is None else request.max_tokens
    return min(prompt_tokens + wanted, context_tokens_max)
