"""Subjects and the patterns that match them, as the memory broker reads them. Sans-IO.

A *subject* is one or more `.`-separated tokens, none of them empty. A *pattern* may use `*` for
exactly one token and a final `>` for one or more. The rules are those of NATS, so that what works
in memory works on a server. Where messages go is decided in `events.py`.
"""

from __future__ import annotations

import re

from trinamo.runtime.errors import RequestError

SUBJECT_CHARS_MAX = 1024

# Whitespace and control characters would end the subject early in the line protocol of NATS, and
# its clients refuse a wildcard inside a longer token.
_WORD = r"[^\s.*>\x00-\x1f\x7f]+"
_SUBJECT = re.compile(rf"{_WORD}(?:\.{_WORD})*")
_PATTERN = re.compile(rf"(?:(?:{_WORD}|\*)\.)*(?:{_WORD}|\*|>)")


def check_subject(subject: str) -> None:
    """Raise `RequestError` unless `subject` can be published to: no wildcard, no empty token."""
    _check(subject, _SUBJECT)


def check_pattern(pattern: str) -> None:
    """Raise `RequestError` unless `pattern` can be subscribed to; `>` only as its last token."""
    _check(pattern, _PATTERN)


def is_pattern(subject: str) -> bool:
    """Whether any token is a wildcard."""
    return "*" in subject or ">" in subject


def matches(pattern: str, subject: str) -> bool:
    """Whether a message on `subject` reaches a subscription on `pattern`; both checked before."""
    wanted = pattern.split(".")
    tokens = subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(tokens) <= len(wanted):
            return False
    elif len(wanted) != len(tokens):
        return False
    return all(want in {"*", token} for want, token in zip(wanted, tokens, strict=False))


def _check(subject: str, form: re.Pattern[str]) -> None:
    if len(subject) > SUBJECT_CHARS_MAX:
        raise RequestError(
            f"subject of {len(subject)} characters; at most {SUBJECT_CHARS_MAX} allowed",
            param="subject",
        )
    if form.fullmatch(subject) is None:
        raise RequestError(f"not a subject that can be used here: {subject!r}", param="subject")
