"""What an answer may look like, token by token: JSON by a schema, a language, or calls of tools.

Grammars are llguidance's, one of the two that llama.cpp can be built with. Its own (GBNF) ends
the process at a token that it does not expect, takes milliseconds a token, and passes over what it
does not know of a schema; `docs/decisions/0030` has the figures. What cannot be a grammar is refused here,
before the request waits for a place; what would take too long to make is found out in a child process
(`sandbox/`). Masks need no such bound: llguidance counts their steps. Needs the extra `llamacpp`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from ...errors import EngineError, GrammarDeadEndError, RequestError
from ...logs.text import cut
from ...protocol.openai.generate import SCHEMA_CHARS_MAX, TOOL_NAMED, GenerateRequest
from ...protocol.openai.tool_calls import CALL_BEGIN, CALL_END
from .schemas import arguments_of, check_formed, formed

_TOKENS_TRIED: Final = 8
"""Some grammars come to the limits of llguidance's lexer a token or two behind their beginning."""
_MAY_BE_LONG: Final = 120
_JSON_MARK: Final = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}\[\],]', re.DOTALL)
_LIMITS: Final = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)


class Grammar:
    """Where one answer is in its grammar, of which `tokens` are the bytes of all tokens."""

    def __init__(self, matcher: LLMatcher, tokens: Sequence[bytes]) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._bits = allocate_token_bitmask(1, len(tokens))
        self._taken = 0
        self._answer_ids: Sequence[int] = ()

    def follow(self, answer_ids: Sequence[int]) -> None:
        """Take what is new of the whole answer so far; `EngineError` if the grammar has no such text."""
        self._answer_ids = answer_ids
        for token_id in answer_ids[self._taken :]:
            if not self._matcher.consume_token(token_id):
                raise EngineError(
                    f"token {token_id} does not fit the grammar of the answer: {self._why()}"
                )
            self._taken += 1

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may be next, the ends of an answer among them; `GrammarDeadEndError` if none can."""
        fill_next_token_bitmask(self._matcher, self._bits)
        bits = np.unpackbits(self._bits.view(np.uint8)[0], bitorder="little")
        allowed = bits[: len(self._tokens)].astype(np.bool_)
        if self._matcher.is_error() or not allowed.any():
            text = b"".join(self._tokens[each] for each in self._answer_ids)
            raise GrammarDeadEndError(
                f"the form that was asked for leaves no way on at {place_of(text)} of the answer:"
                f" {self._why()}"
            )
        return allowed

    def _why(self) -> str:
        return self._matcher.get_error().partition("\n")[0][:_MAY_BE_LONG] or "it is complete"


def place_of(text: bytes) -> str:
    """Where the beginning `text` of an answer ends: by the keys and indices of its JSON."""
    place: list[str | int] = []
    for found in _JSON_MARK.finditer(text.decode("utf-8", "replace")):
        match found[0]:
            case "{":
                place.append("")
            case "[":
                place.append(0)
            case "}" | "]" if place:
                place.pop()
            case "," if place:
                last = place[-1]
                place[-1] = last + 1 if isinstance(last, int) else ""
            case string if place and place[-1] == "" and string[0] == '"':
                place[-1] = string[1:-1]
    names = (f"[{each}]" if isinstance(each, int) else f".{each}" for each in place if each != "")
    return cut("$" + "".join(names), _MAY_BE_LONG)


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
        self._tokens = tokens
        self._end_ids = frozenset(end_ids)
        vocabulary = _Vocabulary(tokens, encode, end_ids[0], special_ids)
        self._tokenizer = LLTokenizer(vocabulary, n_vocab=len(tokens), eos_token=list(end_ids))  # type: ignore[arg-type]

    def compile(self, source: str) -> LLMatcher:
        """The grammar of `source`, at its beginning; `EngineError` if it is none.

        Bounded by nothing but what `source` asks for; other threads go on meanwhile.
        """
        made = LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)
        if made.is_error():
            raise EngineError(_told(made.get_error()))
        return made

    def open(self, matcher: LLMatcher) -> Grammar:
        """An answer at its beginning."""
        return Grammar(matcher.deep_copy(), self._tokens)

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


def _told(error: str) -> str:
    """What llguidance says in several lines, some of them the client's own, in short."""
    lines = error.splitlines()
    reasons = [each for each in lines if each.startswith("error: ")]
    return " ".join(each[:_MAY_BE_LONG] for each in lines[:1] + reasons[:1])


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


def grammar_of(request: GenerateRequest, *, closes_objects: bool = True) -> tuple[str, str]:
    """The grammar that the answer of `request` must have, and the parameter that asks for it.

    Empty if it is free. Raises `RequestError` for schemas that are too large, or none.
    """
    choice = request.tool_choice if request.tools else "none"
    must_call = choice not in ("", "none", "auto")
    forms = _forms(request)
    if not (must_call or forms):
        return "", ""
    if len(forms) > 1:
        raise RequestError("an answer has one form; ask for one", param="structured_outputs")
    starts, rules = [], []
    if choice != "none":
        is_one = not request.parallel_tool_calls or choice.startswith(TOOL_NAMED)
        starts.append("call" if is_one else r'call ("\n" call)*')
        rules += _call_rules(request, closes_objects=closes_objects)
    grammars = []
    param = "tools"
    if not must_call:
        ((kind, text),) = forms.items()
        param = "response_format" if kind == "json_schema" else "structured_outputs"
        starts.append("@answer")
        answer = _answer_rules(kind, text, request.choices, closes_objects=closes_objects)
        grammars.append({"name": "answer", "lark_grammar": answer})
    whole = "\n".join([f"start: {' | '.join(starts)}", *rules])
    return json.dumps({"grammars": [{"name": "whole", "lark_grammar": whole}, *grammars]}), param


def _forms(request: GenerateRequest) -> dict[str, str]:
    """The forms that the answer of `request` is to have, by the fields that ask for them."""
    forms = {
        "json_schema": request.json_schema,
        "regex": request.regex,
        "choices": "".join(request.choices),
        "grammar": request.grammar,
    }
    for text in forms.values():
        if len(text) > SCHEMA_CHARS_MAX:
            raise RequestError(
                f"the form of an answer has at most {SCHEMA_CHARS_MAX} characters",
                param="structured_outputs",
            )
    return {field: text for field, text in forms.items() if text}


def _answer_rules(kind: str, text: str, choices: list[str], *, closes_objects: bool) -> str:
    """A grammar of its own, so that no name in it is one of ours."""
    match kind:
        case "json_schema":
            schema = _decoded(text, "response_format")
            return (
                f"start: %json {formed(schema, 'response_format', closes_objects=closes_objects)}"
            )
        case "regex":
            (made,) = json.loads(LLMatcher.grammar_from_regex(text))["grammars"]
            return str(made["lark_grammar"])
        case "choices":
            return "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)
        case _:
            return text


def _call_rules(request: GenerateRequest, *, closes_objects: bool) -> list[str]:
    """One rule for each function that may be called; `$ref`s are to its own parameters."""
    functions = [tool["function"] for tool in _decoded(request.tools, "tools")]
    if request.tool_choice.startswith(TOOL_NAMED):
        name = request.tool_choice.removeprefix(TOOL_NAMED)
        functions = [each for each in functions if each["name"] == name]
    kinds = " | ".join(f"call_{number}" for number in range(len(functions)))
    rules = [f'call: "{CALL_BEGIN}\\n" ({kinds}) "\\n{CALL_END}"']
    chars = 0
    for number, function in enumerate(functions):
        head = json.dumps(f'{{"name": "{function["name"]}", "arguments": ')
        parameters = arguments_of(function.get("parameters"))
        arguments = formed(
            parameters,
            "tools",
            closes_objects=closes_objects,
            of=f"the function {function['name']!r}",
        )
        chars += len(arguments)
        check_formed(chars, "tools")
        rules.append(f'call_{number}: {head} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {arguments}")
    return rules


def _decoded(text: str, param: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"'{param}' is not valid JSON: {error}", param=param) from None
