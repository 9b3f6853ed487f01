"""The next token of a sequence whose request asks for more than llama.cpp's own chain of samplers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import attrs
import numpy as np
import trio
from llguidance import LLMatcher

from ...errors import EngineError, RequestError
from ...protocol.openai.generate import GenerateRequest
from ..loop.step import Shaping, StepItem
from .grammars import Compiler, Grammar, grammar_of
from .sampling import choose, is_reshaped, reshape, tell
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
