"""What a line may show: text of others made harmless, exceptions made short, secrets masked.

A model's name, a request's id, a key in etcd come from other processes: a newline in one would
forge a line, an escape sequence would command the terminal of who reads it. Errors come out of
nurseries in nested groups, of which Python's own traceback cuts the deepest, where the cause is.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

CHARACTERS_MAX: Final = 4096
CAUSES_MAX: Final = 4
"""Of one failure; what fails together has mostly failed for one reason."""
TRACEBACK_LINES_MAX: Final = 60
"""Of one cause: the first lines say where it came from, the last ones what it is."""
_HEAD_LINES: Final = 20
_TRACEBACK_CHARACTERS_MAX: Final = 500
"""Of one line of a traceback."""
# C0 and C1 controls, separators that some readers take for line ends, marks that turn the direction
# of text round, and surrogates, which no encoder takes.
_HARMFUL: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_OF_ASYNCIO: Final = (
    "no running event loop",
    "library written for some other framework like asyncio",
)
"""What asyncio, and what trio says where asyncio's functions are awaited without its loop."""
_SHORT: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def one_line(text: object, *, characters_max: int = CHARACTERS_MAX) -> str:
    r"""`text` with control characters as JSON writes them (`\n`, `\u001b`), cut at a bound.

    So what is valid JSON stays valid, as long as it is not cut.
    """
    shown = cut(str(text), characters_max)
    # Most lines are harmless, and this is a tenth of a search.
    if shown.isprintable():
        return shown
    return _HARMFUL.sub(lambda it: _SHORT.get(it[0]) or f"\\u{ord(it[0]):04x}", shown)


def cut(text: str, characters_max: int = CHARACTERS_MAX) -> str:
    """`text`, or its beginning and how much more there was."""
    more = len(text) - characters_max
    return text if more <= 0 else f"{text[:characters_max]} … ({more} more characters)"


def leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from leaves(each)
    else:
        yield error


def causes_of(error: BaseException) -> list[BaseException]:
    return list(islice(leaves(error), CAUSES_MAX))


def tell_causes(error: BaseException) -> str:
    """Type and text of what went wrong, without the groups round it, in one line.

    With what each was raised from: the last of these is the root.
    """
    chains: dict[str, None] = {}
    for each in causes_of(error):
        told: list[str] = []
        cause: BaseException | None = each
        while cause is not None and len(told) < CAUSES_MAX:
            told.append(_type_and_text(cause))
            cause = None if cause.__cause__ is None else next(leaves(cause.__cause__))
        chains[", from ".join(told)] = None
    return one_line("; ".join(chains))


def _type_and_text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:  # noqa: BLE001 -- its text is the program's, too, and may fail as all else
        return f"{type(error).__name__}, whose text cannot be made"


def tell_traceback(error: BaseException, *, indent: str = "") -> str:
    """Where each cause came from. Every line is harmless and indented, so none passes for an event."""
    told: list[str] = []
    for cause in causes_of(error):
        lines = "".join(traceback.format_exception(cause)).splitlines()
        left_out = len(lines) - TRACEBACK_LINES_MAX
        if left_out > 0:
            tail = TRACEBACK_LINES_MAX - _HEAD_LINES
            lines = [*lines[:_HEAD_LINES], f"  … {left_out} lines …", *lines[-tail:]]
        told += [
            f"{indent}{one_line(line, characters_max=_TRACEBACK_CHARACTERS_MAX)}" for line in lines
        ]
    return "\n".join(told)


def name_error(error: BaseException) -> str:
    """Its type and text; of what asyncio's functions raise under trio, what to do as well."""
    text = _type_and_text(error)
    if not any(each in text for each in _OF_ASYNCIO):
        return text
    return (
        f"{text}; this runs on trio: to await asyncio's functions an engine is made with"
        ' `loop="asyncio"`, and other code calls them by `trio_asyncio.aio_as_trio`'
    )


def reason(error: BaseException) -> str:
    """What the system says of a connection that cannot be made, without the address once more."""
    while isinstance(error.__cause__, Exception):
        # A group of all the addresses that a name has, each tried.
        cause = error.__cause__
        error = cause.exceptions[0] if isinstance(cause, ExceptionGroup) else cause
    text = str((isinstance(error, OSError) and error.strerror) or error)
    # trio writes `Error connecting to ('10.0.0.7', 80): Connection refused`.
    return text.rpartition("): ")[2] or text


MASK: Final = "***"
# A field whose name has one of these as a word never shows its value ...
SECRET_WORDS: Final = frozenset(
    {"password", "passwd", "secret", "authorization", "credential", "credentials", "cookie"}
)
# ... nor one that ends so. `token` alone is not a word of theirs: most tokens here are text.
SECRET_ENDINGS: Final = ("auth_token", "access_token", "api_token", "api_key", "private_key")
# The user part of a URL, `nats://user:password@host`.
USER_PART: Final = re.compile(r"(?<=://)[^/@\s]+@")
# What nests deeper is written as its repr; bounds the work one event can cause.
DEPTH_MAX: Final = 4
TEXT_CHARACTERS_MAX: Final = 1024
ITEMS_MAX: Final = 64


def mask_text(text: str) -> str:
    """`text` without the user parts of its URLs."""
    return USER_PART.sub(f"{MASK}@", text) if "://" in text else text


def masked(value: Any, depth: int = 0) -> Any:
    """`value` for a line: numbers, text, lists and dictionaries, secrets masked, all bounded.

    A `Secret` of the configuration masks itself.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if depth < DEPTH_MAX and isinstance(value, Mapping):
        return {
            str(key): MASK if is_secret(key) and item is not None else masked(item, depth + 1)
            for key, item in list(value.items())[:ITEMS_MAX]
        }
    if depth < DEPTH_MAX and isinstance(value, (list, tuple)):
        return [masked(item, depth + 1) for item in value[:ITEMS_MAX]]
    if isinstance(value, bytes):
        value = value[:TEXT_CHARACTERS_MAX].decode("utf-8", "replace")
    return cut(mask_text(str(value)), TEXT_CHARACTERS_MAX)


def is_secret(name: object) -> bool:
    text = str(name).lower().replace("-", "_")
    return (
        text == "token"
        or text.endswith(SECRET_ENDINGS)
        or not SECRET_WORDS.isdisjoint(text.split("_"))
    )
