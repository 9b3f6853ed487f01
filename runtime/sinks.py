"""Push: where the items of one stream go as they come, in plain calls, without a task in between.

A source has items: an engine's step loop, or the reader of a connection. A sink takes them: it
encodes and appends to a connection's buffer, or writes to a client's socket. The task of the request
sleeps in `forward` from its first item to its end, its error or its cancellation. Generators and
iterators are a thin pull over the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Sink"]

T = TypeVar("T")


class Sink(ABC, Generic[T]):
    """Takes the items of one stream. Used once, by one source."""

    __slots__ = ("_resume",)

    def __init__(self) -> None:
        self._resume: Callable[[], None] | None = None

    def starts(self, resume: Callable[[], None]) -> None:
        """The source is ready; it can be told by `resume` that there is room again.

        `resume` never waits, may be called at any time, and does nothing if the source has not
        paused.
        """
        self._resume = resume

    @abstractmethod
    def take(self, items: list[T]) -> bool:
        """Take items, all of them; whether there is room for more.

        Never waits. After False the source makes no more; what is on its way already still comes,
        bounded by the window of the stream. What this raises ends the stream, and comes out of
        `forward`.
        """

    def resume(self) -> None:
        """Tell the source that there is room again."""
        if self._resume is not None:
            self._resume()
