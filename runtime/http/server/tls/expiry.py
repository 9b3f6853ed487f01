"""When a certificate ends, read from its bytes: Python's `ssl` tells it of peers' certificates only."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

__all__ = ["find_expiry"]

SEQUENCE: Final = 0x30
EXPLICIT_VERSION: Final = 0xA0
UTC_TIME: Final = 0x17
GENERALIZED_TIME: Final = 0x18
_FORMATS: Final = {UTC_TIME: "%y%m%d%H%M%SZ", GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}


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
    if tag not in _FORMATS:
        raise ValueError("the certificate's end is no time")
    text = der[start:end].decode("ascii")
    return datetime.strptime(text, _FORMATS[tag]).replace(tzinfo=UTC).timestamp()


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
