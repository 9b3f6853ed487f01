"""What a frontend knows of a prompt before it chooses who computes it."""

from __future__ import annotations

from typing import Final

from ...engines.prompts import tokenizer_of
from ...errors import RequestError
from ...protocol.kv.names import BlockNames, RoutingHint, hint_of_text, hint_of_tokens
from ...protocol.openai.generate import GenerateRequest, ModelCard
from ...protocol.openai.passing import prompt_of

_BLOCK_TOKENS: Final = 16
"""Where the card says nothing: then a block is only a measure."""


def make_hint(request: GenerateRequest, card: ModelCard, names: BlockNames) -> RoutingHint | None:
    """The hint for one request to a model: of its tokens where they can be made, else of its text.

    Tokens that were delivered already count as known. Costs about a microsecond a block, 5 ms at
    most. None for a prompt that does not fit: to refuse it is the worker's business.
    """
    block_tokens = card.block_tokens or _BLOCK_TOKENS
    tokenizer = tokenizer_of(card.tokenizer)
    if tokenizer is None:
        return hint_of_text(names, _text(request), block_tokens, request.tenant)
    try:
        token_ids = tokenizer(request, card.context_tokens_max)
    except RequestError:
        return None
    known = [*token_ids, *request.delivered_ids]
    return hint_of_tokens(names, known, block_tokens, request.tenant)


def _text(request: GenerateRequest) -> bytes:
    if request.body:
        return prompt_of(request)
    if request.messages is not None:
        # Apart, so that two messages are not taken for one.
        turns = (f"{each.role}\0{each.content}\0" for each in request.messages)
        return "".join(turns).encode("utf-8", "replace")
    if request.prompt is not None:
        return request.prompt.encode("utf-8", "replace")
    return " ".join(map(str, request.token_ids or ())).encode()
