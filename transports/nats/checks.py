"""What a NATS server would refuse, found before anything is sent. Sans-IO.

A server answers a malformed or oversize message by closing the connection, which would punish
every other user of it. So each message is checked here and its sender alone gets a
`RequestError`. The memory plane has the same rules in its own words; the conformance suite holds
both to them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trinamo.runtime.errors import RequestError

SUBJECT_CHARS_MAX = 1024
"""Subject, reply and sizes must fit the server's control line of 4096 bytes."""

_WORD = r"[^\s.*>\x00-\x1f\x7f]+"
_SUBJECT = re.compile(rf"{_WORD}(?:\.{_WORD})*")
_PATTERN = re.compile(rf"(?:(?:{_WORD}|\*)\.)*(?:{_WORD}|\*|>)")
_GROUP = re.compile(r"[^\s\x00-\x1f\x7f]*")
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
# "NATS/1.0", CR LF, and the empty line that ends the block.
_HEADER_BLOCK_BYTES = 12
_HEADER_LINE_BYTES = 4


def check_subject(subject: str) -> None:
    """Raise `RequestError` unless `subject` can be published to."""
    _check(subject, _SUBJECT)


def check_pattern(pattern: str) -> None:
    """Raise `RequestError` unless `pattern` can be subscribed to."""
    _check(pattern, _PATTERN)


def check_group(group: str) -> None:
    """Raise `RequestError` unless `group` can name a queue group; empty means none."""
    if len(group) > SUBJECT_CHARS_MAX or _GROUP.fullmatch(group) is None:
        raise RequestError(f"not a group name: {group!r}", param="group")


def message_bytes(payload: bytes, headers: Mapping[str, str]) -> int:
    """What the server counts against its `max_payload`; raises `RequestError` for a bad header."""
    if not headers:
        return len(payload)
    size = len(payload) + _HEADER_BLOCK_BYTES
    for name, value in headers.items():
        if _HEADER_NAME.fullmatch(name) is None or "\r" in value or "\n" in value:
            raise RequestError(f"not a header: {name!r}: {value!r}", param="headers")
        size += len(name) + len(value.encode()) + _HEADER_LINE_BYTES
    return size


def _check(subject: str, form: re.Pattern[str]) -> None:
    if len(subject) > SUBJECT_CHARS_MAX:
        raise RequestError(
            f"subject of {len(subject)} characters; at most {SUBJECT_CHARS_MAX} allowed",
            param="subject",
        )
    if form.fullmatch(subject) is None:
        raise RequestError(f"not a subject that can be used here: {subject!r}", param="subject")
