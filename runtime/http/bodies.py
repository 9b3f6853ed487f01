"""How much memory the bodies of all requests may take together, and what is kept of their answers.

A bound for each body and a bound of connections multiply to far more than a process has. What this
file does not do: read (`exchange.py`).
"""

from __future__ import annotations

from typing import Final, Self

from ..errors import OverloadedError

SMALL_BODY_BYTES: Final = 1 << 16
"""So much of each body is not counted: the bound of requests bounds it, and clients that hold long
bodies do not keep short ones out."""


class Bodies:
    """At most `bytes_max` bytes of bodies at once, beyond the first `SMALL_BODY_BYTES` of each.

    Or, if they `are_answers`, of what is kept of those: work that was done.
    """

    def __init__(self, bytes_max: int, *, are_answers: bool = False) -> None:
        self.bytes_max, self.are_answers = bytes_max, are_answers
        self.bound = "answers_bytes_max" if are_answers else "bodies_bytes_max"
        self.bytes_held = 0
        """Zero at quiescence."""


class Body:
    """One request's share: what has arrived, and then what was made of it; or of its answer.

    A context manager; nothing of it is held after leaving.
    """

    __slots__ = ("_bodies", "_counted")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._counted = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hold(0)

    def check(self, size: int) -> None:
        """Raise `OverloadedError` unless a body of `size` bytes finds room now.

        Nothing is set aside for what is only announced.
        """
        bodies = self._bodies
        more = self._count(size) - self._counted
        if more > 0 and bodies.bytes_held + more > bodies.bytes_max:
            raise OverloadedError(
                f"the requests under way hold {bodies.bytes_held} bytes of long bodies; at most"
                f" {bodies.bytes_max} may be held at once ({bodies.bound})",
                bound=bodies.bound,
                value=bodies.bytes_max,
                definite=not bodies.are_answers,
            )

    def hold(self, size: int) -> None:
        """It has `size` bytes now; raises `OverloadedError`, and then holds what it held."""
        counted = self._count(size)
        if counted == self._counted:
            return
        self.check(size)
        self._bodies.bytes_held += counted - self._counted
        self._counted = counted

    @staticmethod
    def _count(size: int) -> int:
        return max(0, size - SMALL_BODY_BYTES)
