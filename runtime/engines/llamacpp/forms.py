"""The forms of answers that were asked for last: made once, in the sandbox first, and kept."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import attrs
import trio
from llguidance import LLMatcher

from ...errors import EngineError, RequestError
from ...protocol.openai.generate import GenerateRequest
from .grammars import Compiler, Grammar, grammar_of
from .sandbox.sandbox import ExceededError, Sandbox

_CACHED_MAX: Final = 64


@attrs.frozen(eq=False)
class Grammars:
    """The grammars that were asked for last, `_CACHED_MAX` of them, and why others are none.

    `closes_objects` as in `schemas.py`.
    """

    _compiler: Compiler
    _sandbox: Sandbox
    _closes_objects: bool = True
    _made: OrderedDict[str, LLMatcher | str] = attrs.field(factory=OrderedDict, init=False)

    async def prepare(self, request: GenerateRequest) -> None:
        """Have the form of its answer ready for `open`; `RequestError` naming the parameter if it is none.

        It is made in the sandbox first, as what one costs is not to be seen in its text.
        """
        source, param = grammar_of(request, closes_objects=self._closes_objects)
        if not source:
            return
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

    def open(self, request: GenerateRequest) -> Grammar | None:
        """The form of its answer, which was prepared, at its beginning; None if it is free.

        Raises `EngineError` if it is none.
        """
        source, _ = grammar_of(request, closes_objects=self._closes_objects)
        if not source:
            return None
        found = self._made.get(source) or self._compiler.compile(source)
        if isinstance(found, str):
            raise EngineError(f"the answer has no grammar: {found}")
        return self._compiler.open(found)
