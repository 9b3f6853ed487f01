"""What an answer may look like, token by token: JSON by a schema, or calls of tools.

Grammars are llguidance's, one of the two that llama.cpp can be built with. Its own (GBNF) ends
the process at a token that it does not expect, takes milliseconds a token, and passes over what it
does not know of a schema; `docs/decisions/0030` has the figures. What cannot be a grammar is refused here,
before the request waits for a place; what would take too long to make is found out in a child process
(`sandbox/`). Masks need no such bound: llguidance counts their steps. Needs the extra `llamacpp`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from ...errors import EngineError, RequestError
from ...protocol.openai.generate import TOOL_NAMED, GenerateRequest
from ...protocol.openai.tool_calls import CALL_BEGIN, CALL_END

DEPTH_MAX: Final = 64
"""Of a schema: what walks it down in native code has a stack."""
INTEGER_MAX: Final = 2**53
"""The grammar counts in floating point: it would let the number beside it stand."""
_TOKENS_TRIED: Final = 8
"""Some grammars come to the limits of llguidance's lexer a token or two behind their beginning."""
_MAY_BE_LONG: Final = 120
# No white space but these: a small model that may write as much as it likes writes nothing else.
_FORM: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LIMITS: Final = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)


class Grammar:
    """Where one answer is in its grammar."""

    def __init__(self, matcher: LLMatcher, vocabulary_size: int) -> None:
        self._matcher = matcher
        self._vocabulary_size = vocabulary_size
        self._bits = allocate_token_bitmask(1, vocabulary_size)
        self._taken = 0

    def follow(self, answer_ids: Sequence[int]) -> None:
        """Take what is new of the whole answer so far; `EngineError` if the grammar has no such text."""
        for token_id in answer_ids[self._taken :]:
            if not self._matcher.consume_token(token_id):
                raise EngineError(
                    f"token {token_id} does not fit the grammar of the answer: {self._why()}"
                )
            self._taken += 1

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may be next, the ends of an answer among them; `EngineError` if none can."""
        fill_next_token_bitmask(self._matcher, self._bits)
        if self._matcher.is_error():
            raise EngineError(f"the grammar of the answer cannot go on: {self._why()}")
        bits = np.unpackbits(self._bits.view(np.uint8)[0], bitorder="little")
        return bits[: self._vocabulary_size].astype(np.bool_)

    def _why(self) -> str:
        return self._matcher.get_error().partition("\n")[0][:_MAY_BE_LONG] or "it is complete"


class Compiler:
    """Makes grammars for one vocabulary.

    `tokens` are the bytes of all tokens, `encode` makes tokens of text, `end_ids` end an answer.
    `special_ids` are never part of a text.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        encode: Callable[[str], list[int]],
        *,
        end_ids: Sequence[int],
        special_ids: Sequence[int],
    ) -> None:
        self._size = len(tokens)
        self._end_ids = frozenset(end_ids)
        vocabulary = _Vocabulary(tokens, encode, end_ids[0], special_ids)
        self._tokenizer = LLTokenizer(vocabulary, n_vocab=self._size, eos_token=list(end_ids))  # type: ignore[arg-type]

    def compile(self, source: str) -> LLMatcher:
        """The grammar of `source`, at its beginning; `EngineError` if it is none.

        Bounded by nothing but what `source` asks for; other threads go on meanwhile.
        """
        made = LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)
        if made.is_error():
            raise EngineError(made.get_error().partition("\n")[0][:_MAY_BE_LONG])
        return made

    def open(self, matcher: LLMatcher) -> Grammar:
        """An answer at its beginning."""
        return Grammar(matcher.deep_copy(), self._size)

    def examine(self, source: str) -> str:
        """Compile it and follow it for a few tokens; why it is no grammar, or empty."""
        answer: list[int] = []
        try:
            grammar = self.open(self.compile(source))
            for _ in range(_TOKENS_TRIED):
                grammar.follow(answer)
                allowed = [int(each) for each in np.flatnonzero(grammar.allowed())]
                texts = [each for each in allowed if each not in self._end_ids]
                if not texts:
                    break
                answer.append(texts[len(texts) // 2])
        except EngineError as error:
            return error.message
        return ""


@attrs.frozen
class _Vocabulary:
    """What `LLTokenizer` asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    tokens: Sequence[bytes]
    _encode: Callable[[str], list[int]]
    eos_token_id: int
    special_token_ids: Sequence[int]

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def grammar_of(request: GenerateRequest) -> tuple[str, str]:
    """The grammar that the answer of `request` must have, and the parameter that asks for it.

    Empty if it is free. Raises `RequestError` for schemas that are too large, or none.
    """
    choice = request.tool_choice if request.tools else "none"
    must_call = choice not in ("", "none", "auto")
    if not (must_call or request.json_schema):
        return "", ""
    starts, rules = [], []
    if choice != "none":
        is_one = not request.parallel_tool_calls or choice.startswith(TOOL_NAMED)
        starts.append("call" if is_one else r'call ("\n" call)*')
        rules += _call_rules(request)
    if must_call:
        param = "tools"
    else:
        param = "response_format"
        starts.append("answer")
        schema = _bounded(_decoded(request.json_schema, param), param)
        rules.append(f"answer: %json {_formed(schema)}")
    return "\n".join([f"start: {' | '.join(starts)}", *rules]), param


def _call_rules(request: GenerateRequest) -> list[str]:
    """One rule for each function that may be called; `$ref`s are to its own parameters."""
    functions = [tool["function"] for tool in _decoded(request.tools, "tools")]
    if request.tool_choice.startswith(TOOL_NAMED):
        name = request.tool_choice.removeprefix(TOOL_NAMED)
        functions = [each for each in functions if each["name"] == name]
    _bounded(functions, "tools")
    kinds = " | ".join(f"call_{number}" for number in range(len(functions)))
    rules = [f'call: "{CALL_BEGIN}\\n" ({kinds}) "\\n{CALL_END}"']
    for number, function in enumerate(functions):
        head = json.dumps(f'{{"name": "{function["name"]}", "arguments": ')
        parameters = function.get("parameters") or {"type": "object"}
        rules.append(f'call_{number}: {head} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {_formed(parameters)}")
    return rules


def _decoded(text: str, param: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"'{param}' is not valid JSON: {error}", param=param) from None


def _formed(schema: Any) -> str:
    # What a client says of the form would say it of our white space, and of what may be passed over.
    return json.dumps({**schema, "x-guidance": _FORM} if isinstance(schema, dict) else schema)


def _bounded(schema: Any, param: str) -> Any:
    """The schema; `RequestError` for what a grammar cannot hold."""
    if schema is True:
        return {}
    for depth, node in _walk(schema):
        if isinstance(node, dict) and any(map(_is_inexact, _values(node))):
            raise RequestError(
                f"'{param}' asks for an integer beyond ±2**53, which the grammar cannot hold exactly",
                param=param,
            )
        if depth > DEPTH_MAX:
            raise RequestError(f"'{param}' is more than {DEPTH_MAX} deep", param=param)
    return schema


def _values(node: dict[str, Any]) -> list[Any]:
    """What an answer may be, word for word."""
    listed = node.get("enum")
    return [node.get("const"), *(listed if isinstance(listed, list) else ())]


def _is_inexact(value: Any) -> bool:
    return isinstance(value, int) and abs(value) > INTEGER_MAX


def _walk(schema: Any) -> Iterator[tuple[int, Any]]:
    pending: list[tuple[int, Any]] = [(0, schema)]
    while pending:
        depth, node = pending.pop()
        if isinstance(node, dict | list):
            yield depth, node
            items = node.values() if isinstance(node, dict) else node
            pending += [(depth + 1, each) for each in items]
