"""Parameters that shape an answer, and those that we do not have. Sans-IO.

Every function takes what the client sent, undecoded, and returns what `GenerateRequest` says of it;
what is wrong is a `RequestError` that names the parameter. Tools are next door (`tools.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Raw

from ...errors import RequestError
from .generate import LOGIT_BIASES_MAX, SCHEMA_CHARS_MAX
from .json_parts import decode_part

ABSENT: Final = Raw()
"""A parameter that was not given, by identity."""
_LOGIT_BIAS_BYTES_MAX: Final = LOGIT_BIASES_MAX * 64
_SHORT_BYTES_MAX: Final = 256
"""A value of an unsupported parameter that changes nothing is shorter."""

TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=20)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]


class _JsonSchema(msgspec.Struct, frozen=True):
    schema: Raw = ABSENT


class _ResponseFormat(msgspec.Struct, frozen=True):
    type: str
    json_schema: _JsonSchema | None = None


_bool_decoder = msgspec.json.Decoder(bool)
_top_decoder = msgspec.json.Decoder(TopLogprobs)
_bool_or_top_decoder: msgspec.json.Decoder[bool | int] = msgspec.json.Decoder(bool | TopLogprobs)
_bias_decoder = msgspec.json.Decoder(dict[TokenId, Bias])
_format_decoder = msgspec.json.Decoder(_ResponseFormat)
_any_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def is_absent(raw: Raw) -> bool:
    """Whether the parameter was left out, or is null."""
    return raw is ABSENT or (len(raw) <= len(b"null") and bytes(raw) in (b"", b"null"))


def chat_logprobs(logprobs: Raw, top_logprobs: Raw) -> int | None:
    """How many alternatives a chat wants told, None for no log probabilities at all."""
    is_wanted = not is_absent(logprobs) and decode_part(_bool_decoder, logprobs, "logprobs")
    count = (
        0 if is_absent(top_logprobs) else decode_part(_top_decoder, top_logprobs, "top_logprobs")
    )
    if is_wanted:
        return count
    if count:
        raise RequestError(
            "'top_logprobs' is only allowed when 'logprobs' is true", param="top_logprobs"
        )
    return None


def completion_logprobs(logprobs: Raw) -> int | None:
    """As `chat_logprobs`; 0 asks for the chosen token's alone, and false for none."""
    if is_absent(logprobs):
        return None
    found = decode_part(_bool_or_top_decoder, logprobs, "logprobs")
    if found is True:
        raise RequestError("'logprobs' of a completion is a number, from 0 to 20", param="logprobs")
    return None if found is False else found


def logit_bias(raw: Raw) -> dict[int, float]:
    """What is added to the logits of tokens, by their ids."""
    if is_absent(raw):
        return {}
    if len(raw) > _LOGIT_BIAS_BYTES_MAX:
        raise RequestError(
            f"'logit_bias' is longer than {_LOGIT_BIAS_BYTES_MAX} bytes", param="logit_bias"
        )
    biases = decode_part(_bias_decoder, raw, "logit_bias")
    if len(biases) > LOGIT_BIASES_MAX:
        raise RequestError(
            f"'logit_bias' names {len(biases)} tokens; at most {LOGIT_BIASES_MAX} are allowed",
            param="logit_bias",
        )
    return {token_id: bias for token_id, bias in biases.items() if bias}


def schema_of(raw: Raw) -> str:
    """The JSON schema that `response_format` asks for; empty if the answer is just text."""
    param = "response_format"
    if is_absent(raw):
        return ""
    if len(raw) > SCHEMA_CHARS_MAX + _SHORT_BYTES_MAX:
        raise RequestError(f"'{param}' is longer than {SCHEMA_CHARS_MAX} characters", param=param)
    found = decode_part(_format_decoder, raw, param)
    if found.type == "text":
        return ""
    if found.type == "json_object":
        return '{"type":"object"}'
    if found.type != "json_schema":
        raise RequestError(
            f"'{param}.type' is {found.type[:40]!r}; it must be text, json_object or json_schema",
            param=f"{param}.type",
        )
    if found.json_schema is None or is_absent(found.json_schema.schema):
        where = f"{param}.json_schema.schema"
        raise RequestError(f"'{where}' is missing", param=where)
    return json_text(found.json_schema.schema, f"{param}.json_schema.schema")


def json_text(raw: Raw, param: str) -> str:
    """The JSON in `raw`, an object or a boolean as schemas are, in its shortest form."""
    value = decode_part(_any_decoder, raw, param)
    if not isinstance(value, dict | bool):
        raise RequestError(f"'{param}' must be a JSON schema, which is an object", param=param)
    return msgspec.json.encode(value).decode()


def refuse(
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
        if is_absent(value):
            return
        is_short = len(value) <= _SHORT_BYTES_MAX
        found = decode_part(_any_decoder, value, param) if is_short else value
    if found is None or (empty_is_harmless and not found):
        return
    # `1 == True` in Python, so the type is compared as well.
    if any(type(found) is type(known) and found == known for known in harmless):
        return
    raise RequestError(f"'{param}' is not supported by this server", param=param)
