"""What happened in a run: rows that are only ever added, and their digest.

Two runs of one seed are the same run exactly when their digests are equal; `first_difference`
finds where two others part. A row holds plain values only, because the address of an object or
the order of a set would differ from process to process.

What this module does not do: judge. Checkers read the rows. Read next: `env.py`, through which
the runtime adds its own facts.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

__all__ = ["Row", "Trace", "first_difference"]

Plain = str | int | float | bytes | bool | None | tuple[Any, ...]


class Row(NamedTuple):
    """One event: virtual seconds, the host (and its incarnation) it happened on, kind, fields."""

    time_s: float
    host: str
    kind: str
    fields: tuple[tuple[str, Plain], ...]

    def field(self, name: str) -> Any:
        """The value of a field; `KeyError` if the row has none of that name."""
        return dict(self.fields)[name]


class Trace:
    """The rows of one run. With `keep` False only the digest is held, in constant memory."""

    def __init__(self, *, keep: bool = True) -> None:
        self.rows: list[Row] = []
        self.count = 0
        self.is_muted = False
        self._keep = keep
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, time_s: float, host: str, kind: str, fields: Mapping[str, Any]) -> None:
        """Append one row; raises `TypeError` for a value that is not plain. Nothing once muted."""
        if self.is_muted:
            return
        row = Row(
            round(time_s, 9), host, kind, tuple((name, _plain(v)) for name, v in fields.items())
        )
        self.count += 1
        self._hash.update(repr(tuple(row)).encode())
        if self._keep:
            self.rows.append(row)

    @property
    def digest(self) -> str:
        """Hexadecimal BLAKE2b of all rows so far."""
        return self._hash.hexdigest()

    def of_kind(self, kind: str) -> list[Row]:
        """The kept rows of one kind, in order."""
        return [row for row in self.rows if row.kind == kind]


def first_difference(a: Trace, b: Trace) -> str:
    """The first row in which two kept traces differ, in words; empty if they are equal."""
    for number, (left, right) in enumerate(zip_longest(a.rows, b.rows)):
        if left != right:
            return f"row {number}:\n  {left}\n  {right}"
    return ""


def _plain(value: Any) -> Plain:
    if value is None or type(value) in (str, int, float, bytes, bool):
        return value  # type: ignore[no-any-return]
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item) for item in value)
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), _plain(item)) for key, item in value.items()))
    if isinstance(value, (str, int, float)):
        return str(value)
    raise TypeError(f"a trace row holds plain values only, not {type(value).__qualname__}")
