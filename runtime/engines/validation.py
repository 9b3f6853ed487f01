"""What every engine asks of a request before it looks at the text.

Each failure is a `RequestError` that names the parameter. What only one engine can know (does the
prompt fit, is a token id in the vocabulary) is checked there.
"""

from __future__ import annotations

from collections.abc import Container

from ..errors import RequestError
from ..protocol.openai.generate import (
    STOP_CHARS_MAX,
    STOP_STRINGS_MAX,
    GenerateRequest,
    features_of,
)

ROLES = ("system", "user", "assistant", "tool")
TEMPERATURE_MAX = 2
LOGPROBS_MAX = 20
PENALTY_MAX = 2


def check_features(request: GenerateRequest, features: Container[str]) -> None:
    """Raise `RequestError` if `request` asks for what is not among `features`: see `Feature`."""
    for feature, param in features_of(request):
        if feature not in features:
            raise RequestError(f"'{param}' is not supported by this model", param=param)


def check_request(request: GenerateRequest) -> None:
    """Raise `RequestError` unless the request is one an engine can take."""
    _check_prompt(request)
    _check_sampling(request)
    if len(request.stop) > STOP_STRINGS_MAX:
        raise RequestError(
            f"{len(request.stop)} stop strings; at most {STOP_STRINGS_MAX} are allowed",
            param="stop",
        )
    if not all(0 < len(stop) <= STOP_CHARS_MAX for stop in request.stop):
        raise RequestError(
            f"every stop string must have 1 to {STOP_CHARS_MAX} characters", param="stop"
        )


def check_prompt_fits(prompt_tokens: int, context_tokens_max: int) -> None:
    """Raise `RequestError` unless the prompt leaves room for at least one generated token."""
    if prompt_tokens == 0:
        raise RequestError("the prompt is empty", param="prompt")
    if prompt_tokens >= context_tokens_max:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens, but the model's context holds"
            f" {context_tokens_max} tokens, prompt and answer together; shorten it",
            param="prompt",
        )


def _check_prompt(request: GenerateRequest) -> None:
    given = [x for x in (request.messages, request.prompt, request.token_ids) if x is not None]
    if len(given) != 1:
        raise RequestError(
            f"exactly one of messages, prompt and token_ids must be given, not {len(given)}",
            param="messages",
        )
    if request.messages is not None:
        if not request.messages:
            raise RequestError("messages is empty; at least one is needed", param="messages")
        for index, message in enumerate(request.messages):
            if message.role not in ROLES:
                raise RequestError(
                    f"messages[{index}].role is {message.role!r}; known roles are"
                    f" {', '.join(ROLES)}",
                    param=f"messages[{index}].role",
                )
    elif not given[0]:
        raise RequestError("the prompt is empty", param="prompt")


def _check_sampling(request: GenerateRequest) -> None:
    if request.max_tokens is not None and request.max_tokens < 1:
        raise RequestError(
            f"max_tokens is {request.max_tokens}; it must be at least 1", param="max_tokens"
        )
    # Written so that a NaN is refused too.
    if not 0 <= request.temperature <= TEMPERATURE_MAX:
        raise RequestError(
            f"temperature is {request.temperature}; it must be from 0 to {TEMPERATURE_MAX}",
            param="temperature",
        )
    if not 0 < request.top_p <= 1:
        raise RequestError(
            f"top_p is {request.top_p}; it must be above 0 and at most 1", param="top_p"
        )
    if request.logprobs is not None and not 0 <= request.logprobs <= LOGPROBS_MAX:
        raise RequestError(
            f"logprobs is {request.logprobs}; it must be from 0 to {LOGPROBS_MAX}", param="logprobs"
        )
    _check_range(request.min_p, 0, 1, "min_p")
    _check_range(request.presence_penalty, -PENALTY_MAX, PENALTY_MAX, "presence_penalty")
    _check_range(request.frequency_penalty, -PENALTY_MAX, PENALTY_MAX, "frequency_penalty")
    _check_range(request.top_k, 0, 2**31 - 1, "top_k")
    if not 0 < request.repetition_penalty <= PENALTY_MAX:
        raise RequestError(
            f"repetition_penalty is {request.repetition_penalty}; it must be above 0 and at most"
            f" {PENALTY_MAX}",
            param="repetition_penalty",
        )
    for bias in request.logit_bias.values():
        _check_range(bias, -100, 100, "logit_bias")


def _check_range(value: float, least: float, most: float, param: str) -> None:
    if not least <= value <= most:
        raise RequestError(f"{param} is {value}; it must be from {least} to {most}", param=param)
