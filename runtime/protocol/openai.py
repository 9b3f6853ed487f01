"""OpenAI's requests as structs, and what they mean to an engine.

Requests are decoded and checked here, so that everything behind sees a valid `GenerateRequest`.
A parameter that we do not support and that would change the answer is refused by name; fields we
do not know are ignored, as OpenAI does. What this module does not do: answers
(`openai_answers.py`) and HTTP (`runtime/http`).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec

from ..errors import RequestError
from .generate import ChatMessage, GenerateRequest

__all__ = [
    "STOP_STRINGS_MAX",
    "ChatCompletionRequest",
    "CompletionRequest",
    "ContentPart",
    "RequestMessage",
    "StreamOptions",
    "decode_chat_request",
    "decode_completion_request",
]

STOP_STRINGS_MAX = 32
COMPLETION_TOKENS_DEFAULT = 16
"""OpenAI's default for `max_tokens` of `/v1/completions`; chat has none."""

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
    tool_calls: Any = None
    function_call: Any = None


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
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Any = None
    logprobs: Any = None

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        """Whether a streamed answer ends with a chunk that carries the usage."""
        return bool(self.stream_options is not None and self.stream_options.include_usage)


class ChatCompletionRequest(_SharedRequest, frozen=True, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: list[RequestMessage]
    max_completion_tokens: Positive | None = None
    top_logprobs: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None

    def to_generate(self, model: str) -> GenerateRequest:
        """What the engine of `model` is asked; raises `RequestError` naming the parameter."""
        self._refuse_unsupported()
        if not self.messages:
            raise RequestError("'messages' must hold at least one message", param="messages")
        tokens_max = self.max_completion_tokens
        return GenerateRequest(
            model=model,
            messages=[_turn(i, message) for i, message in enumerate(self.messages)],
            max_tokens=self.max_tokens if tokens_max is None else tokens_max,
            **_sampling(self),
        )

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

    prompt: str | list[Any]
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None

    def to_generate(self, model: str) -> GenerateRequest:
        """What the engine of `model` is asked; raises `RequestError` naming the parameter."""
        _refuse_shared(self)
        # Zero asks for the chosen token's log probability, so unlike chat's false it means yes.
        _refuse(self.logprobs, "logprobs", empty_is_harmless=False, harmless=(False,))
        _refuse(self.suffix, "suffix")
        _refuse(self.echo, "echo")
        _refuse(self.best_of, "best_of", harmless=(1,))
        prompt, token_ids = _prompt(self.prompt)
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


def _stop_strings(stop: str | list[str] | None) -> list[str]:
    if stop is None:
        return []
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > STOP_STRINGS_MAX:
        raise RequestError(
            f"'stop' holds {len(strings)} strings; at most {STOP_STRINGS_MAX} are allowed",
            param="stop",
        )
    if "" in strings:
        raise RequestError("'stop' holds an empty string, which would stop at once", param="stop")
    return strings


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


def _prompt(prompt: str | list[Any]) -> tuple[str | None, list[int] | None]:
    """The prompt as text or as token ids: exactly one of the two is not None."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt, None
    if not prompt:
        raise RequestError("'prompt' must not be empty", param="prompt")
    if isinstance(prompt[0], str | list):
        raise RequestError(
            f"'prompt' holds {len(prompt)} prompts; send one request for each", param="prompt"
        )
    try:
        return None, msgspec.convert(prompt, list[TokenId])
    except msgspec.ValidationError as error:
        raise RequestError(
            f"'prompt' must be a string, one string in a list, or a list of token ids: {error}",
            param="prompt",
        ) from None


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


def _refuse(
    value: Any, param: str, *, harmless: tuple[Any, ...] = (), empty_is_harmless: bool = True
) -> None:
    """Raise unless the value of an unsupported parameter leaves the answer as it is."""
    if value is None or (empty_is_harmless and not value):
        return
    # `1 == True` in Python, so the type is compared as well.
    if any(type(value) is type(known) and value == known for known in harmless):
        return
    raise RequestError(f"'{param}' is not supported by this server", param=param)


_RequestT = TypeVar("_RequestT", ChatCompletionRequest, CompletionRequest)
_chat_decoder = msgspec.json.Decoder(ChatCompletionRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


def decode_chat_request(body: bytes) -> ChatCompletionRequest:
    """The request in `body`; raises `RequestError` naming the parameter that is wrong."""
    return _decode_request(_chat_decoder, body)


def decode_completion_request(body: bytes) -> CompletionRequest:
    """The request in `body`; raises `RequestError` naming the parameter that is wrong."""
    return _decode_request(_completion_decoder, body)


_PATH = re.compile(r" - at `\$\.?(?P<path>.*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<field>.*?)`")


def _decode_request(decoder: msgspec.json.Decoder[_RequestT], body: bytes) -> _RequestT:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None


def _explain(message: str) -> RequestError:
    found = _PATH.search(message)
    param = found["path"] if found else ""
    text = message[: found.start()] if found else message
    missing = _MISSING.match(text)
    if missing:
        param = f"{param}.{missing['field']}" if param else missing["field"]
        return RequestError(f"'{param}' is missing", param=param)
    if not param:
        return RequestError(f"the body is wrong: {text}")
    return RequestError(f"'{param}' is wrong: {text}", param=param)
