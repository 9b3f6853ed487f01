"""From a request to the sequence that the step loop computes, with everything checked."""

from __future__ import annotations

import random

from ...protocol.openai.generate import GenerateRequest
from ..validation import check_prompt_fits, check_request
from .sequence import TokenSequence
from .step import Sampling, StepEngine

__all__ = ["known_tokens", "sequence_of"]

SEED_BITS = 64


def known_tokens(engine: StepEngine, request: GenerateRequest) -> list[int]:
    """The tokens of the prompt; raises `RequestError` if it is none the engine can take."""
    check_request(request)
    token_ids = engine.encode(request)
    check_prompt_fits(len(token_ids), engine.info.context_tokens_max)
    return token_ids


def sequence_of(engine: StepEngine, request: GenerateRequest, rng: random.Random) -> TokenSequence:
    """A new sequence; `rng` draws a seed where the request has none. Raises `RequestError`."""
    token_ids = known_tokens(engine, request)
    context_tokens_max = engine.info.context_tokens_max
    wanted = context_tokens_max if request.max_tokens is None else request.max_tokens
    seed = rng.getrandbits(SEED_BITS) if request.seed is None else request.seed
    return TokenSequence(
        token_ids=token_ids,
        prompt_tokens=len(token_ids),
        tokens_max=min(len(token_ids) + wanted, context_tokens_max),
        sampling=Sampling(
            temperature=request.temperature,
            top_p=request.top_p,
            seed=seed % (1 << SEED_BITS),
        ),
    )
