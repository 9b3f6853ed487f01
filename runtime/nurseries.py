"""The one rule for exception groups: a nursery of ours lets one error out, as itself.

trio's nurseries raise a group, also of a single error, and every nursery between an error and its
user is one more group: `except KeyError` does not catch, and the traceback hides what happened.
So every nursery of `runtime`, `transports` and the command line is opened here. Groups that a
handler or an application makes are taken apart by `single` where they reach us.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final, TypeVar

import trio

from .logs.text import leaves

_log = logging.getLogger("trinamo.nurseries")
T = TypeVar("T")

_CONSEQUENCES: Final = (trio.Cancelled, trio.BrokenResourceError, trio.ClosedResourceError)
"""What a task raises because another one has failed, or has closed something under it."""


def open_nursery() -> AbstractAsyncContextManager[trio.Nursery]:
    """`trio.open_nursery`, but what leaves it is one error: the body's or that of one task.

    `single` says which. A group that the body itself raises leaves as that group.
    """
    return _Opened()


async def first_of(*waits: Callable[[], Awaitable[T]]) -> T:
    """What the first of `waits` to end returns, or raises; the others are cancelled.

    All must be safe to cancel.
    """
    found: list[T] = []

    async def run(wait: Callable[[], Awaitable[T]]) -> None:
        value = await wait()
        found.append(value)
        nursery.cancel_scope.cancel()

    async with open_nursery() as nursery:
        for wait in waits:
            nursery.start_soon(run, wait)
    return found[0]


class _Opened:
    __slots__ = ("_manager",)

    async def __aenter__(self) -> trio.Nursery:
        self._manager = trio.open_nursery()
        return await self._manager.__aenter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        body: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        try:
            return await self._manager.__aexit__(exc_type, body, traceback)
        except BaseExceptionGroup as group:
            error = _chosen(group.exceptions)
        if error is body or _is_copy(error, body):
            return False
        context = error.__context__
        try:
            raise error
        finally:
            # The group is no news to anybody; raising has made it the context.
            error.__context__ = context
            del error, body, context


def forget_frames(error: BaseException | None) -> None:
    """Let go of the frames in which `error`, and what led to it, were raised: nobody will look at them.

    They may hold bodies of megabytes, and most often the error itself: such a cycle waits for
    Python's collector, which looks seldom in a process that serves.
    """
    seen: set[int] = set()
    left = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            left += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


def is_failure(error: BaseException) -> bool:
    """Whether what raised it has failed: it neither was cancelled, nor is Ctrl-C to end the process.

    A library may raise what is no `Exception` at all: `SystemExit`, or a panic of Rust.
    """
    ends = (trio.Cancelled, GeneratorExit, KeyboardInterrupt)
    return not any(isinstance(leaf, ends) for leaf in leaves(error))


def single(error: BaseException) -> BaseException:
    """The one error that stands for a group, nested groups included; any other error is itself.

    What is no `Exception`, such as a `KeyboardInterrupt`, comes first. Of the others it is the
    first in time: trio keeps that order, and what follows happened while everything was being
    cancelled. A mere consequence stands for a group only if there is nothing else in it. Others
    that are no consequences are logged, once, and named in a note of the one that is returned.
    """
    return _chosen(list(leaves(error)))


def _chosen(errors: Sequence[BaseException]) -> BaseException:
    causes = [error for error in errors if not _is(_CONSEQUENCES, error)]
    graver = [error for error in causes if not _is((Exception, *_CONSEQUENCES), error)]
    known = [error for error in errors if not _is((trio.Cancelled,), error)]
    chosen = next(iter((*graver, *causes, *known, *errors)))
    for other in causes:
        if other is not chosen:
            chosen.add_note(f"also raised: {type(other).__name__}: {other}")
            _log.warning("%r was raised, and also", chosen, exc_info=other)
    return chosen


def _is_copy(error: BaseException, body: BaseException | None) -> bool:
    """Trio takes groups apart to look for cancellation, and puts them together again."""
    return (
        isinstance(error, BaseExceptionGroup)
        and isinstance(body, BaseExceptionGroup)
        and list(leaves(error)) == list(leaves(body))
    )


def _is(kinds: tuple[type[BaseException], ...], error: BaseException) -> bool:
    """Whether an error, or everything in a group, is of these kinds."""
    return all(isinstance(leaf, kinds) for leaf in leaves(error))
