"""OpenAI's requests as structs, and what they mean to an engine.

Requests are decoded and checked here, so that everything behind sees a valid `GenerateRequest`.
A parameter that we do not support and that would change the answer is refused by name; fields we
do not know are ignored, as OpenAI does.

**What can be long is measured before it is decoded.** A body of four megabytes may hold two million
numbers, each of which becomes an object: so the prompt, the stop strings and whatever is refused
anyway stay undecoded (`Raw`) until the model, and so the context that they have to fit, is known.
What this module does not do: answers (`answers.py`) and HTTP (`runtime/http`).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import msgspec
from msgspec import Raw
from typing_extensions import Buffer

from ...errors import RequestError
from .generate import (
    STOP_CHARS_MAX,
    STOP_STRINGS_MAX,
    TOKEN_CHARS_MAX,
    ChatMessage,
    GenerateRequest,
)
from .json_parts import decode_json, decode_part

__all__ = [
    "CONTEXT_TOKENS_MAX",
    "ChatCompletionRequest",
    "CompletionRequest",
    "ContentPart",
    "RequestMessage",
    "StreamOptions",
    "decode_chat_request",
    "decode_completion_request",
]

CONTEXT_TOKENS_MAX: Final = 1 << 20
"""The context of a model that does not tell its own; the largest that can be configured."""
STOP_BYTES_MAX: Final = STOP_STRINGS_MAX * (STOP_CHARS_MAX * len(r"\ud83d\ude00") + 64)
"""As long as JSON of allowed stop strings can be."""
REFUSED_BYTES_MAX: Final = 256
"""A value of an unsupported parameter that changes nothing is shorter."""
COMPLETION_TOKENS_DEFAULT = 16
"""OpenAI's default for `max_tokens` of `/v1/completions`; chat has none."""

ABSENT: Final = Raw()
"""A parameter that was not given, by identity."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only `text` parts are supported."""

    type: str
    text: str | None = None


class RequestMessage(msgspec.Struct, frozen=True):
    """One turn as the client sends it."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: Raw = ABSENT
    function_call: Raw = ABSENT


class StreamOptions(msgspec.Struct, frozen=True):
    """What a streamed answer carries besides its text."""

    include_usage: bool | None = None


class _SharedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints take. Null means: not given."""

    model: str | None = None
    max_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Int64 | None = None
    stop: Raw = ABSENT
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Raw = ABSENT
    logprobs: Raw = ABSENT

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        """Whether a streamed answer ends with a chunk that carries the usage."""
        return bool(self.stream_options is not None and self.stream_options.include_usage)


class ChatCompletionRequest(_SharedRequest, frozen=True, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Raw
    max_completion_tokens: Positive | None = None
    top_logprobs: Raw = ABSENT
    tools: Raw = ABSENT
    tool_choice: Raw = ABSENT
    functions: Raw = ABSENT
    function_call: Raw = ABSENT
    response_format: Raw = ABSENT
    modalities: Raw = ABSENT
    audio: Raw = ABSENT
    web_search_options: Raw = ABSENT

    def to_generate(
        self, model: str, context_tokens_max: int = CONTEXT_TOKENS_MAX
    ) -> GenerateRequest:
        """What the engine of `model` is asked; raises `RequestError` naming the parameter."""
        self._refuse_unsupported()
        tokens_max = self.max_completion_tokens
        return GenerateRequest(
            model=model,
            messages=_turns(self.messages, context_tokens_max),
            max_tokens=self.max_tokens if tokens_max is None else tokens_max,
            **_sampling(self),
        )

    @property
    def content_bytes(self) -> int:
        """The part of the body that a request keeps."""
        return len(self.messages)

    def _refuse_unsupported(self) -> None:
        _refuse_shared(self)
        _refuse(self.tools, "tools")
        _refuse(self.functions, "functions")
        _refuse(self.tool_choice, "tool_choice", harmless=("none", "auto"))
        _refuse(self.function_call, "function_call", harmless=("none", "auto"))
        _refuse(self.logprobs, "logprobs")
        _refuse(self.top_logprobs, "top_logprobs")
        _refuse(self.response_format, "response_format", harmless=({"type": "text"},))
        _refuse(self.modalities, "modalities", harmless=(["text"],))
        _refuse(self.audio, "audio")
        _refuse(self.web_search_options, "web_search_options", empty_is_harmless=False)


class CompletionRequest(_SharedRequest, frozen=True, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: Raw
    suffix: Raw = ABSENT
    echo: bool | None = None
    best_of: Int64 | None = None

    @property
    def content_bytes(self) -> int:
        """The part of the body that a request keeps."""
        return len(self.prompt)

    def to_generate(
        self, model: str, context_tokens_max: int = CONTEXT_TOKENS_MAX
    ) -> GenerateRequest:
        """What the engine of `model` is asked; raises `RequestError` naming the parameter."""
        _refuse_shared(self)
        # Zero asks for the chosen token's log probability, so unlike chat's false it means yes.
        _refuse(self.logprobs, "logprobs", empty_is_harmless=False, harmless=(False,))
        _refuse(self.suffix, "suffix")
        _refuse(self.echo, "echo")
        _refuse(self.best_of, "best_of", harmless=(1,))
        prompt, token_ids = _prompt(self.prompt, context_tokens_max)
        return GenerateRequest(
            model=model,
            prompt=prompt,
            token_ids=token_ids,
            max_tokens=self.max_tokens or COMPLETION_TOKENS_DEFAULT,
            **_sampling(self),
        )


def _sampling(request: _SharedRequest) -> dict[str, Any]:
    return {
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "seed": request.seed,
        "stop": _stop_strings(request.stop),
    }


def _stop_strings(raw: Raw) -> list[str]:
    if _is_absent(raw):
        return []
    if len(raw) > STOP_BYTES_MAX:
        raise RequestError(f"'stop' is longer than {STOP_BYTES_MAX} bytes", param="stop")
    stop = decode_part(_stop_decoder, raw, "stop")
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > STOP_STRINGS_MAX:
        raise RequestError(
            f"'stop' holds {len(strings)} strings; at most {STOP_STRINGS_MAX} are allowed",
            param="stop",
        )
    if "" in strings:
        raise RequestError("'stop' holds an empty string, which would stop at once", param="stop")
    return strings


def _turns(raw: Raw, context_tokens_max: int) -> list[ChatMessage]:
    messages = decode_part(_messages_decoder, raw, "messages")
    if not messages:
        raise RequestError("'messages' must hold at least one message", param="messages")
    if len(messages) > context_tokens_max:
        raise RequestError(
            f"'messages' holds {len(messages)} messages; the model's context holds"
            f" {context_tokens_max} tokens",
            param="messages",
        )
    turns = [_turn(i, message) for i, message in enumerate(messages)]
    _check_chars(sum(len(turn.content) for turn in turns), context_tokens_max, "messages")
    return turns


def _check_chars(chars: int, context_tokens_max: int, param: str) -> None:
    """Raise unless the text may fit the context: how many tokens it has, only the engine knows."""
    if chars > context_tokens_max * TOKEN_CHARS_MAX:
        raise RequestError(
            f"'{param}' holds {chars} characters, but the model's context holds"
            f" {context_tokens_max} tokens; shorten it",
            param=param,
        )


def _turn(index: int, message: RequestMessage) -> ChatMessage:
    where = f"messages[{index}]"
    role = _ROLES.get(message.role)
    if role is None:
        raise RequestError(
            f"role {message.role[:40]!r} of '{where}' is not supported; "
            "use system, developer, user or assistant",
            param=f"{where}.role",
        )
    _refuse(message.tool_calls, f"{where}.tool_calls")
    _refuse(message.function_call, f"{where}.function_call")
    content = message.content
    if content is None:
        raise RequestError(f"'{where}.content' is missing", param=f"{where}.content")
    if isinstance(content, str):
        return ChatMessage(role, content)
    return ChatMessage(role, "".join(_text(where, i, part) for i, part in enumerate(content)))


def _text(where: str, index: int, part: ContentPart) -> str:
    param = f"{where}.content[{index}]"
    if part.type != "text":
        raise RequestError(
            f"content of type {part.type[:40]!r} is not supported; only 'text' is", param=param
        )
    if part.text is None:
        raise RequestError(f"'{param}.text' is missing", param=f"{param}.text")
    return part.text


def _prompt(raw: Raw, context_tokens_max: int) -> tuple[str | None, list[int] | None]:
    """The prompt as text or as token ids: exactly one of the two is not None."""
    kinds = _list_starts(raw)
    if kinds in ('["', "[["):
        raw = _only_one(raw)
        kinds = _list_starts(raw)
    if kinds == '"':
        prompt = decode_part(_text_decoder, raw, "prompt")
        _check_chars(len(prompt), context_tokens_max, "prompt")
        return prompt, None
    if kinds == "[]":
        raise RequestError("'prompt' must not be empty", param="prompt")
    # Of a list of numbers this is how many there are; whatever else has commas is refused below.
    count = bytes(raw).count(b",") + 1
    if count > context_tokens_max:
        raise RequestError(
            f"the prompt has {count} tokens, but the model's context holds {context_tokens_max}"
            " tokens, prompt and answer together; shorten it",
            param="prompt",
        )
    try:
        return None, _tokens_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            f"'prompt' must be a string, one string in a list, or a list of token ids: {error}",
            param="prompt",
        ) from None


def _list_starts(raw: Raw) -> str:
    """The first character of a JSON value, and of its first item if it is a list."""
    found = _LIST_START.match(raw)
    return "" if found is None else b"".join(found.groups(b"")).decode("latin-1")


def _only_one(raw: Raw) -> Raw:
    """The one item of a list, without a look at any second."""
    try:
        (item,) = _single_decoder.decode(raw)
    except msgspec.ValidationError:
        raise RequestError(
            "'prompt' holds several prompts; send one request for each", param="prompt"
        ) from None
    return item


def _refuse_shared(request: _SharedRequest) -> None:
    if request.n not in (None, 1):
        raise RequestError(
            f"n = {request.n} is not supported: an answer has exactly one choice, so n must be 1",
            param="n",
        )
    _refuse(request.presence_penalty, "presence_penalty")
    _refuse(request.frequency_penalty, "frequency_penalty")
    _refuse(request.logit_bias, "logit_bias")
    if request.stream_options is not None and not request.stream:
        raise RequestError(
            "'stream_options' is only allowed when 'stream' is true", param="stream_options"
        )


def _is_absent(raw: Raw) -> bool:
    return raw is ABSENT or (len(raw) <= len(b"null") and bytes(raw) in (b"", b"null"))


def _refuse(
    value: Raw | float | None,
    param: str,
    *,
    harmless: tuple[Any, ...] = (),
    empty_is_harmless: bool = True,
) -> None:
    """Raise unless the value of an unsupported parameter leaves the answer as it is."""
    found: Any = value
    if value is ABSENT or value is None:
        return
    if isinstance(value, Raw):
        if _is_absent(value):
            return
        is_short = len(value) <= REFUSED_BYTES_MAX
        found = decode_part(_any_decoder, value, param) if is_short else value
    if found is None or (empty_is_harmless and not found):
        return
    # `1 == True` in Python, so the type is compared as well.
    if any(type(found) is type(known) and found == known for known in harmless):
        return
    raise RequestError(f"'{param}' is not supported by this server", param=param)


_LIST_START = re.compile(rb"\s*([\[\"])(?:(?<=\[)\s*([\[\"\]]))?")
_chat_decoder = msgspec.json.Decoder(ChatCompletionRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_messages_decoder = msgspec.json.Decoder(list[RequestMessage])
_stop_decoder: msgspec.json.Decoder[str | list[str]] = msgspec.json.Decoder(str | list[str])
_text_decoder = msgspec.json.Decoder(str)
_tokens_decoder = msgspec.json.Decoder(list[TokenId])
_single_decoder = msgspec.json.Decoder(tuple[Raw])
_any_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def decode_chat_request(body: Buffer) -> ChatCompletionRequest:
    """The request in `body`; raises `RequestError` naming the parameter that is wrong."""
    return decode_json(_chat_decoder, body)


def decode_completion_request(body: Buffer) -> CompletionRequest:
    """The request in `body`; raises `RequestError` naming the parameter that is wrong."""
    return decode_json(_completion_decoder, body)
