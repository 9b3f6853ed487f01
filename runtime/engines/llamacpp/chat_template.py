"""A chat rendered as the model was trained on it: the Jinja template from the model's file.

A template is data that came with a download, so it runs in Jinja's immutable sandbox, its output
is bounded, and what it may cost is `sandbox/`'s to say. A template that writes tools, and
calls in the form of `protocol/openai/tool_calls.py`, is given them; for any other they are told in words
(`told_in_words`). Needs the extra `llamacpp`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...errors import ConfigError, ContextLengthError, EngineError, RequestError
from ...protocol.openai.generate import ChatMessage
from ...protocol.openai.tool_calls import CALL_BEGIN, CALL_END

PROMPT_BYTES_PER_TOKEN_MAX: Final = 16
"""A longer prompt is refused before it is tokenised, which costs about a millisecond a kilobyte
and is done between two events of the loop. Prose has 4."""
_GIVEN: Final = "chat_template_kwargs"
_NOT_AN_OBJECT: Final = "invalid_arguments"
_NO_ID: Final = re.compile(r"[^\w.:-]")
_OTHER_FORM: Final = "<function="
"""Templates that have it write calls in another form, between the same tags."""


class ChatTemplate:
    """Renders messages up to where the assistant's answer begins.

    `chars_max` bounds the result; `specials` are the special tokens, which no JSON in it has. Raises
    `ConfigError` if `source` is no template.
    """

    def __init__(
        self,
        source: str,
        *,
        chars_max: int,
        bos: str = "",
        eos: str = "",
        specials: Sequence[str] = (),
    ) -> None:
        self._chars_max = chars_max
        self._specials = [each for each in specials if each]
        self._knows_tools = "tools" in source and CALL_BEGIN in source and _OTHER_FORM not in source
        # White space as in the templates that models ship: a line of tags leaves no line.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.filters["tojson"] = self._to_json
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template is malformed: {error}") from error
        self._tokens = {"bos_token": bos, "eos_token": eos}

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: str = "",
        given: str = "",
        end: str = "",
    ) -> str:
        """The prompt; `tools` is OpenAI's list as JSON, `given` an object of what it reads besides.

        With `end`, which the last turn has at its end, it ends there, as if that was not complete.
        Raises `RequestError` if it gets too long or the template refuses it.
        """
        try:
            text = self._render_bounded(messages, tools, _given(given), is_open=bool(end))
        except RequestError:
            raise
        except Exception as error:
            # Whatever it raises: a template is data that came from elsewhere.
            raise EngineError(f"the model's chat template failed: {error}") from error
        if not end:
            return text
        before, found, _ = text.rpartition(end)
        if not found:
            raise RequestError(
                "the model's chat template does not show the last message, so nothing can continue it",
                param="continue_final_message",
            )
        return before

    def _to_json(self, value: Any, indent: int | None = None) -> str:
        """As the templates expect it, without HTML's escapes; nor does it end a turn."""
        text = json.dumps(value, ensure_ascii=False, indent=indent)
        for special in self._specials:
            if special in text:
                text = text.replace(special, f"\\u{ord(special[0]):04x}{special[1:]}")
        return text

    def _turn(self, index: int, message: ChatMessage) -> dict[str, Any]:
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            turn["tool_calls"] = [
                {**call, "id": _NO_ID.sub("", call.get("id", ""))}
                for call in calls_of(message, index)
            ]
        if message.role == "tool":
            turn["tool_call_id"] = _NO_ID.sub("", message.tool_call_id)
            turn["name"] = _NO_ID.sub("", message.name)
        return turn

    def _render_bounded(
        self, messages: Sequence[ChatMessage], tools: str, given: dict[str, Any], *, is_open: bool
    ) -> str:
        known = json.loads(tools) if tools else []
        if not self._knows_tools:
            messages = told_in_words(messages, known, self._to_json)
        turns = [self._turn(index, message) for index, message in enumerate(messages)]
        pieces: list[str] = []
        chars = 0
        for piece in self._template.generate(
            {
                **given,
                **self._tokens,
                "messages": turns,
                "tools": known if known and self._knows_tools else None,
                "add_generation_prompt": not is_open,
            }
        ):
            chars += len(piece)
            if chars > self._chars_max:
                raise ContextLengthError.of(
                    self._chars_max // PROMPT_BYTES_PER_TOKEN_MAX,
                    f"more than {self._chars_max} characters",
                    "messages",
                )
            pieces.append(piece)
        return "".join(pieces)


def _given(text: str) -> dict[str, Any]:
    """What a client gives the template; `RequestError` if that is no object."""
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{_GIVEN} is no JSON: {error}", param=_GIVEN) from None
    if not isinstance(given, dict):
        raise RequestError(f"{_GIVEN} must be an object", param=_GIVEN)
    return given


def _raise_exception(message: str) -> None:
    raise RequestError(f"the model's chat template refuses these messages: {message}")


_HEAD: Final = """You may call functions to answer the user. Their signatures:
<tools>
"""
_TAIL: Final = f"""
</tools>
To call one, write its name and arguments as JSON between these tags, and nothing else:
{CALL_BEGIN}
{{"name": <function>, "arguments": <arguments>}}
{CALL_END}"""

Dumps = Callable[[Any], str]


def calls_of(message: ChatMessage, index: int) -> list[dict[str, Any]]:
    """The calls of an assistant, their arguments decoded; `RequestError` if they are not calls.

    Arguments that are not a JSON object become one with the text as its only member. `max_tokens` cuts a call in
    the middle of its arguments, and clients send such an answer back as history: a refusal would make that
    conversation unusable. An object it is because many templates iterate over it, and because its JSON has
    special tokens escaped, which bare text would not.
    """
    if not message.tool_calls:
        return []
    where = f"messages[{index}].tool_calls"
    try:
        calls: list[dict[str, Any]] = json.loads(message.tool_calls)
        for call in calls:
            called = call["function"]
            called["arguments"] = _arguments(called["arguments"])
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise RequestError(f"'{where}' is not a list of calls: {error}", param=where) from None
    return calls


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "null")
    except (ValueError, RecursionError):
        found = text
    if isinstance(found, dict):
        return found
    return {} if found is None else {_NOT_AN_OBJECT: text}


def told_in_words(
    messages: Sequence[ChatMessage], tools: Sequence[Any], dumps: Dumps
) -> list[ChatMessage]:
    """The same conversation in turns of system, user and assistant alone.

    What several tools answer is one turn: many templates want user and assistant to alternate.
    """
    turns: list[ChatMessage] = []
    last = ""
    for index, message in enumerate(messages):
        role, pieces = message.role, [message.content] if message.content else []
        for call in calls_of(message, index):
            function = {name: call["function"][name] for name in ("name", "arguments")}
            pieces.append(f"{CALL_BEGIN}\n{dumps(function)}\n{CALL_END}")
        if role == "tool":
            pieces = [f"<tool_response>\n{message.content}\n</tool_response>"]
        if role == last == "tool":
            pieces.insert(0, turns.pop().content)
        turns.append(ChatMessage("user" if role == "tool" else role, "\n".join(pieces)))
        last = role
    if tools:
        told = _HEAD + "\n".join(map(dumps, tools)) + _TAIL
        if turns[0].role == "system":
            told = f"{turns.pop(0).content}\n\n{told}"
        turns.insert(0, ChatMessage("system", told))
    return turns
