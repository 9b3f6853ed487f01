"""How much memory the bodies of all requests may take together, and what is kept of their answers.

A bound for each body and a bound of connections multiply to far more than a process has, and who
sends half of one holds what others need. A compressed body is bounded as it is when it is decompressed: a few bytes of one
may stand for gigabytes. What this file does not do: read (the exchange).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from types import TracebackType
from typing import Any, Final, Self

import trio

from ..errors import DeadlineError, OverloadedError, RequestError
from .shares import Budget
from .status import BodyTimeoutError, BodyTooLargeError, MediaTypeError

SMALL_BODY_BYTES: Final = 1 << 16
"""So much of each body is not counted: the bound of requests bounds it, and clients that hold long
bodies do not keep short ones out."""


def check_length(size: int, bytes_max: int) -> None:
    """Raise `BodyTooLargeError` for a body of `size` bytes, if that is too much for one."""
    if size > bytes_max:
        raise BodyTooLargeError(f"the body is larger than http.body_bytes_max {bytes_max}")


_WINDOW_LOG: Final = 23
"""Of zstd: 8 MiB, which RFC 9659 has for HTTP. A frame may ask for gigabytes."""
_PARTS_MAX: Final = 16
"""Of one body. What follows a part is copied, so many would cost the square of their number."""
_GZIP: Final = 16 + zlib.MAX_WBITS
_RAW: Final = -zlib.MAX_WBITS


@cache
def _zstd() -> Any:
    """The library of Python 3.14, or its back-port; None where neither is."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return import_module(name)
        except ImportError:
            continue
    return None


def _inflater(data: bytearray) -> Any:
    """For `deflate`, which is zlib's by RFC 9110, and bare of some clients."""
    is_zlib = len(data) > 1 and data[0] & 15 == 8 and (data[0] << 8 | data[1]) % 31 == 0
    return zlib.decompressobj(zlib.MAX_WBITS if is_zlib else _RAW)


def _codings() -> dict[str, Callable[[bytearray], Any]]:
    """What makes the decompressor of a part of a body, by the coding's name."""
    found: dict[str, Callable[[bytearray], Any]] = {
        "gzip": lambda _: zlib.decompressobj(_GZIP),
        "x-gzip": lambda _: zlib.decompressobj(_GZIP),
        "deflate": _inflater,
    }
    if (zstd := _zstd()) is not None:
        limits = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
        found["zstd"] = lambda _: zstd.ZstdDecompressor(options=limits)
    return found


def find_decoder(coding: bytes | None) -> Callable[[bytearray, int], bytearray] | None:
    """What decompresses a body with this `Content-Encoding`, to so many bytes at most; None: nothing need.

    Raises `MediaTypeError` for one that is not known.
    """
    name = (coding or b"identity").decode("latin-1").strip().lower()
    if name == "identity":
        return None
    codings = _codings()
    if name not in codings:
        raise MediaTypeError(
            f"the content-encoding is {name[:40]!r}; it must be {', '.join(codings)} or identity"
        )
    return partial(_decompress, name, codings[name])


def _decompress(
    name: str, make: Callable[[bytearray], Any], data: bytearray, bytes_max: int
) -> bytearray:
    """The body in `data`; `BodyTooLargeError` once it is longer than `bytes_max`.

    Both of gzip and of zstd there may be several parts, one after the other.
    """
    found, rest = bytearray(), data
    for _ in range(_PARTS_MAX + 1):
        if not rest:
            return found
        part = make(rest)
        try:
            # One byte more says that there is too much, and no more than that is ever made.
            found += part.decompress(rest, bytes_max + 1 - len(found))
        except Exception as error:  # noqa: BLE001 -- each library has an error of its own
            raise RequestError(f"the body is not valid {name}: {error}") from None
        check_length(len(found), bytes_max)
        if not part.eof:
            raise RequestError(f"the body ends in the middle of its {name}")
        rest = bytearray(part.unused_data)
    raise RequestError(f"the body is of more than {_PARTS_MAX} parts of {name}")


class Bodies:
    """At most `bytes_max` bytes of bodies at once, beyond the first `SMALL_BODY_BYTES` of each.

    And `count_max` on their way. At either bound the party that has most on its way loses the
    oldest of them. Or, if they `are_answers`, of what is kept of those: work that was done.
    """

    def __init__(self, bytes_max: int, count_max: int = 4096, *, are_answers: bool = False) -> None:
        self.bytes_max, self.are_answers = bytes_max, are_answers
        self.bound = "answers_bytes_max" if are_answers else "bodies_bytes_max"
        self.bytes_held = self.bytes_arriving = 0
        """The second is a part of the first. Zero at quiescence, as is `arriving`."""
        self.arriving = Budget("http.bodies_max", count_max * SMALL_BODY_BYTES)

    def has_room_for_copy(self, size: int) -> bool:
        """Whether a copy of `size` bytes finds room beside all that is held, what arrives included.

        Copies leave half of the bound to bodies, or one answer of many choices would keep others' out.
        """
        return self.bytes_held + _count(size) <= self.bytes_max // 2


def _count(size: int) -> int:
    return max(0, size - SMALL_BODY_BYTES)


class Body:
    """One request's share: what has arrived, and then what was made of it; or of its answer.

    A context manager; nothing of it is held after leaving.
    """

    __slots__ = ("_bodies", "_counted", "_party", "_scope", "has_given_way")

    def __init__(self, bodies: Bodies, party: str = "") -> None:
        self._bodies, self._party = bodies, party
        self._counted = 0
        self._scope: trio.CancelScope | None = None
        """While it arrives."""
        self.has_given_way = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hold(0)

    def begin(self, scope: trio.CancelScope) -> None:
        """It arrives inside `scope` from here on, which `give_way` ends."""
        self._scope = scope
        self._bodies.bytes_arriving += self._counted
        self._bodies.arriving.hold(self._party, self, SMALL_BODY_BYTES + self._counted)

    def give_way(self) -> None:
        scope, self.has_given_way = self._scope, True
        self.end()
        self.hold(0)
        if scope is not None:
            scope.cancel()

    def end(self) -> None:
        """Nothing of it arrives any more."""
        if self._scope is not None:
            self._scope = None
            self._bodies.bytes_arriving -= self._counted
            self._bodies.arriving.hold(self._party, self, 0)

    def check(self, size: int) -> None:
        """Raise `OverloadedError` unless `size` bytes find room beside the bodies that have arrived.

        Nothing is set aside for what is only announced.
        """
        bodies, own = self._bodies, self._counted if self._scope is None else 0
        more = _count(size) - own
        whole = bodies.bytes_held - bodies.bytes_arriving
        if more > 0 and whole + more > bodies.bytes_max:
            raise OverloadedError(
                f"the requests under way hold {whole} bytes of long bodies; at most"
                f" {bodies.bytes_max} may be held at once ({bodies.bound})",
                bound=bodies.bound,
                value=bodies.bytes_max,
                definite=not bodies.are_answers,
            )

    def hold(self, size: int) -> None:
        """It has `size` bytes now; raises `OverloadedError`, and then holds what it held."""
        bodies, counted = self._bodies, _count(size)
        if counted == self._counted:
            return
        self.check(size)
        # Each that has to give way may be this one.
        while bodies.bytes_held + counted - self._counted > bodies.bytes_max:
            if not bodies.arriving.evict():
                break
        bodies.bytes_held += counted - self._counted
        if self._scope is not None:
            bodies.bytes_arriving += counted - self._counted
        self._counted = counted
        if self._scope is not None:
            bodies.arriving.hold(self._party, self, SMALL_BODY_BYTES + counted)

    @property
    def arriving_max(self) -> int:
        return self._bodies.arriving.amount_max // SMALL_BODY_BYTES


class Arrival:
    """The time in which `body` arrives: a context manager, in which what has not come is waited for.

    Raises `BodyTimeoutError`, `DeadlineError` at `deadline`, on trio's clock, or `OverloadedError`
    if it had to give way to others.

    A class, and not a generator: from Python 3.12 on, the frame of a generator that ends what was
    thrown into it, the frame of `contextlib` around it, and that exception hold each other, and
    with them all that the reader had read, until the collector comes by.
    """

    __slots__ = ("_body", "_deadline", "_scope", "_timeout_s")

    def __init__(self, body: Body, timeout_s: float, deadline: float) -> None:
        self._body, self._timeout_s, self._deadline = body, timeout_s, deadline
        self._scope = trio.CancelScope(deadline=min(trio.current_time() + timeout_s, deadline))

    def __enter__(self) -> None:
        self._scope.__enter__()
        self._body.begin(self._scope)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._body.end()
        is_handled = self._scope.__exit__(kind, error, trace)
        if not self._scope.cancelled_caught:
            return is_handled
        if self._body.has_given_way:
            raise OverloadedError(
                f"http.bodies_max {self._body.arriving_max} bodies are on their way, of which this was the"
                " oldest of whoever sends most",
                bound="bodies_max",
                value=self._body.arriving_max,
            )
        if self._scope.deadline == self._deadline:
            raise DeadlineError(
                "the answer was not begun in the time that it had: the body took it"
            )
        raise BodyTimeoutError(f"the body was not complete within {self._timeout_s:g} s")
