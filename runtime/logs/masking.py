"""What a field may show: no secret, and no more text than a line should have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from ..config.keys import Secret
from .text import cut

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
    """`value` for a line: numbers, text, lists and dictionaries, secrets masked, all bounded."""
    if isinstance(value, Secret):
        return MASK
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
    """Whether a field of this name holds a secret."""
    text = str(name).lower().replace("-", "_")
    return (
        text == "token"
        or text.endswith(SECRET_ENDINGS)
        or not SECRET_WORDS.isdisjoint(text.split("_"))
    )
