"""JSON from clients, whole or a part that was left undecoded: errors name the parameter. Sans-IO."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from typing_extensions import Buffer

from ...errors import RequestError

_T = TypeVar("_T")
_PATH = re.compile(r" - at `\$\.?(?P<path>.*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<field>.*?)`")


def decode_json(decoder: msgspec.json.Decoder[_T], body: Buffer) -> _T:
    """What is in `body`; raises `RequestError`."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None


def decode_part(decoder: msgspec.json.Decoder[_T], raw: msgspec.Raw, param: str) -> _T:
    """What was left undecoded; its errors name the parameter as if the whole body was decoded."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _explain(str(error), param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None


def _explain(message: str, within: str = "") -> RequestError:
    found = _PATH.search(message)
    param = within + (found["path"] if found else "")
    text = message[: found.start()] if found else message
    missing = _MISSING.match(text)
    if missing:
        param = f"{param}.{missing['field']}" if param else missing["field"]
        return RequestError(f"'{param}' is missing", param=param)
    if not param:
        return RequestError(f"the body is wrong: {text}")
    return RequestError(f"'{param}' is wrong: {text}", param=param)
