"""What a broker would refuse, found before anything is sent. Sans-IO.

A *subject* is one or more `.`-separated tokens, none of them empty. A *pattern* may use `*` for
exactly one token and a final `>` for one or more. The rules are those of NATS, whose server answers
a malformed or oversize message by closing the connection, which would punish every other user of
it: so each message is checked here and its sender alone gets a `RequestError`. Every event plane
asks here, so that what works in memory works on a server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from ..errors import RequestError

SUBJECT_CHARS_MAX: Final = 1024
"""Subject, reply and sizes must fit the server's control line of 4096 bytes."""

# Whitespace and control characters would end the subject early in the line protocol of NATS, and
# its clients refuse a wildcard inside a longer token.
_WORD = r"[^\s.*>\x00-\x1f\x7f]+"
_SUBJECT = re.compile(rf"{_WORD}(?:\.{_WORD})*")
_PATTERN = re.compile(rf"(?:(?:{_WORD}|\*)\.)*(?:{_WORD}|\*|>)")
_GROUP = re.compile(r"[^\s\x00-\x1f\x7f]*")
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
# "NATS/1.0", CR LF, and the empty line that ends the block.
_HEADER_BLOCK_BYTES: Final = 12
_HEADER_LINE_BYTES: Final = 4


def check_subject(subject: str, form: re.Pattern[str] = _SUBJECT) -> None:
    """Raise `RequestError` unless `subject` can be published to: no wildcard, no empty token."""
    if len(subject) > SUBJECT_CHARS_MAX:
        raise RequestError(
            f"subject of {len(subject)} characters; at most {SUBJECT_CHARS_MAX} allowed",
            param="subject",
        )
    if form.fullmatch(subject) is None:
        raise RequestError(f"not a subject that can be used here: {subject!r}", param="subject")


def check_pattern(pattern: str, group: str = "") -> None:
    """Raise `RequestError` unless `pattern` can be subscribed to by this queue group, if any."""
    check_subject(pattern, _PATTERN)
    if len(group) > SUBJECT_CHARS_MAX or _GROUP.fullmatch(group) is None:
        raise RequestError(f"not a group name: {group!r}", param="group")


def check_message(
    subject: str, payload: bytes, reply: str, headers: Mapping[str, str], *, bytes_max: int
) -> int:
    """What the server counts against `bytes_max`; raises `RequestError` for what it refuses."""
    check_subject(subject)
    if reply:
        check_subject(reply)
    size = len(payload) + (_HEADER_BLOCK_BYTES if headers else 0)
    for name, value in headers.items():
        if _HEADER_NAME.fullmatch(name) is None or "\r" in value or "\n" in value:
            raise RequestError(f"not a header: {name!r}: {value!r}", param="headers")
        size += len(name) + len(value.encode()) + _HEADER_LINE_BYTES
    if size > bytes_max:
        raise RequestError(
            f"message of {size} bytes; the server takes {bytes_max}", param="payload"
        )
    return size
