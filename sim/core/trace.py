"""What happened in a run: rows that are only ever added, and their digest.

Two runs of one seed are the same run exactly when their digests are equal; `first_difference`
finds where two others part. Segments are there with a checksum of their bytes, and the last row says how
many dice were drawn. A row holds plain values only, because the address of an object or
the order of a set would differ from process to process.

What this module does not do: judge. Checkers read the rows. Read next: `SimEnv` of `world.py`, through which
the runtime adds its own facts.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import attrs
import msgspec

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


Fields = tuple[tuple[str, Plain], ...]
_Raw = tuple[float, str, str, Fields]
# At a quarter of the price of `Row(*raw)`; checkers read tens of thousands of rows of each run.
_row: Callable[[_Raw], Row] = partial(tuple.__new__, Row)
CHUNK = 256
"""How many rows are hashed at a time, which is cheaper than one by one."""
BUSY_KINDS = frozenset({"step", "arrive", "block"})
"""Kinds of rows that are many and say nothing about the run's subject."""
_encode = msgspec.msgpack.Encoder().encode
_PLAIN_TYPES = frozenset({str, int, float, bytes, bool, type(None)})


class Trace:
    """The rows of one run. With `keep` False only the digest is held, in constant memory."""

    def __init__(self, *, keep: bool = True) -> None:
        self.count = 0
        self.is_muted = False
        self._keep = keep
        self._hash = hashlib.blake2b(digest_size=16)
        self._raw: list[_Raw] = []
        self._rows: list[Row] = []
        self._unhashed: list[_Raw] = []
        self._time_s = self._rounded_s = 0.0

    @property
    def rows(self) -> list[Row]:
        """The kept rows, in order; the same list each time, grown by what was added since."""
        if len(self._rows) < len(self._raw):
            self._rows += map(_row, self._raw[len(self._rows) :])
        return self._rows

    @property
    def told(self) -> list[Row]:
        """The kept rows without the steps of tasks and the arrivals of segments, which are most."""
        return [_row(raw) for raw in self._raw if raw[2] not in BUSY_KINDS]

    def add(self, time_s: float, host: str, kind: str, fields: Mapping[str, Any]) -> None:
        """Append one row; raises `TypeError` for a value that is not plain. Nothing once muted."""
        if self.is_muted:
            return
        plain = [
            (name, value if type(value) in _PLAIN_TYPES else _plain(value))
            for name, value in fields.items()
        ]
        self.add_plain(time_s, host, kind, tuple(plain))

    def add_plain(self, time_s: float, host: str, kind: str, fields: Fields) -> None:
        """As `add`, for fields that are known to be plain."""
        if self.is_muted:
            return
        if time_s != self._time_s:
            self._time_s, self._rounded_s = time_s, round(time_s, 9)
        row = (self._rounded_s, host, kind, fields)
        self.count += 1
        self._unhashed.append(row)
        if len(self._unhashed) == CHUNK:
            self._hash.update(_encoded(self._unhashed))
            self._unhashed.clear()
        if self._keep:
            self._raw.append(row)

    @property
    def digest(self) -> str:
        """Hexadecimal BLAKE2b of all rows so far."""
        total = self._hash.copy()
        total.update(_encoded(self._unhashed))
        return total.hexdigest()

    def texts(self) -> list[str]:
        """The kept rows as text, one line each."""
        return [repr(row) for row in self._raw]

    def of_kind(self, kind: str) -> list[Row]:
        """The kept rows of one kind, in order."""
        return [_row(raw) for raw in self._raw if raw[2] == kind]


@attrs.frozen
class Difference:
    """Where two traces part: the row's number, both rows (None past an end), what came before."""

    number: int
    left: Row | None
    right: Row | None
    before: tuple[Row, ...]

    def __str__(self) -> str:
        lines = [f"row {self.number}:", f"  {self.left}", f"  {self.right}"]
        return "\n".join(
            lines + (["after"] + [f"  {row}" for row in self.before] if self.before else [])
        )


def diff(left: Trace, right: Trace, *, context: int = 3) -> Difference | None:
    """The first row in which two kept traces differ, with the `context` rows before it; or None."""
    for number, (one, other) in enumerate(zip_longest(left.rows, right.rows)):
        if one != other:
            return Difference(
                number, one, other, tuple(left.rows[max(0, number - context) : number])
            )
    return None


def first_difference(a: Trace, b: Trace) -> str:
    """The first row in which two kept traces differ, in words; empty if they are equal."""
    return str(diff(a, b, context=0) or "")


def _encoded(rows: list[_Raw]) -> bytes:
    """The same bytes for equal rows in any process."""
    try:
        return _encode(rows)
    except (OverflowError, UnicodeEncodeError):
        # An integer beyond 64 bits, or half a surrogate pair.
        return repr(rows).encode("utf-8", "backslashreplace")


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
