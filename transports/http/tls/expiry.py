"""When a certificate ends, read from its bytes: Python's `ssl` tells it of peers' certificates only."""

from __future__ import annotations

import re
from calendar import timegm
from typing import Final

SEQUENCE: Final = 0x30
EXPLICIT_VERSION: Final = 0xA0
UTC_TIME: Final = 0x17
GENERALIZED_TIME: Final = 0x18
_TIME: Final = re.compile(rb"(\d{2}|\d{4})(\d\d)(\d\d)(\d\d)(\d\d)(\d\d)Z")
_CENTURY_STARTS: Final = 50
"""A year of two digits below this is of the 2000s (RFC 5280, section 4.1.2.5.1)."""


def find_expiry(der: bytes) -> float:
    """The end of a certificate's validity, in seconds since 1970 (RFC 5280, section 4.1).

    Raises `ValueError` for bytes that are no certificate.
    """
    certificate = _enter(der, 0, SEQUENCE)
    at = _enter(der, certificate, SEQUENCE)
    if der[at : at + 1] == bytes([EXPLICIT_VERSION]):
        at = _skip(der, at)
    # The serial number, the signature's algorithm, the issuer; then the validity.
    for _ in range(3):
        at = _skip(der, at)
    at = _skip(der, _enter(der, at, SEQUENCE))
    tag, start, end = _element(der, at)
    time = _TIME.fullmatch(der[start:end])
    if tag not in (UTC_TIME, GENERALIZED_TIME) or time is None:
        raise ValueError("the certificate's end is no time")
    year, month, day, hour, minute, second = map(int, time.groups())
    if tag == UTC_TIME:
        year += 2000 if year < _CENTURY_STARTS else 1900
    return float(timegm((year, month, day, hour, minute, second)))


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag, start and end of the contents of the element at `at`."""
    if at + 2 > len(der):
        raise ValueError("the certificate is cut short")
    tag, size, start = der[at], der[at + 1], at + 2
    if size & 0x80:
        count = size & 0x7F
        size = int.from_bytes(der[start : start + count], "big")
        start += count
    if start + size > len(der):
        raise ValueError("the certificate is cut short")
    return tag, start, start + size


def _enter(der: bytes, at: int, wanted: int) -> int:
    tag, start, _ = _element(der, at)
    if tag != wanted:
        raise ValueError("this is no certificate")
    return start


def _skip(der: bytes, at: int) -> int:
    return _element(der, at)[2]
