"""Fields that every line of a scope, or of the whole process, gets: `request_id`, `instance_id`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar, copy_context
from functools import partial
from types import TracebackType
from typing import Any, Final, TypeVarTuple

import trio

Ts = TypeVarTuple("Ts")
_EMPTY: Final[dict[str, Any]] = {}
_scope: ContextVar[dict[str, Any]] = ContextVar("log_fields", default=_EMPTY)
_process: dict[str, Any] = {}


class log_fields:  # noqa: N801 -- used as a function, once for every request
    """Add fields to every line of this scope and of the tasks that are started in it."""

    __slots__ = ("_fields", "_token")

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def __enter__(self) -> None:
        self._token = _scope.set({**_scope.get(), **self._fields})

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _scope.reset(self._token)


def name_task(**fields: Any) -> None:
    """Add fields to every line of this task, and of those that it starts, from now on.

    For a task that does one thing to its end, which needs no scope.
    """
    _scope.set({**_scope.get(), **fields})


def add_fields(**fields: Any) -> None:
    """Add fields to the lines of the innermost scope that are still to come, in all of its tasks.

    For what is found out on the way, such as who serves a request. Without a scope nothing happens.
    """
    found = _scope.get()
    if found is not _EMPTY:
        found.update(fields)


def start_nameless(
    nursery: trio.Nursery, work: Callable[[*Ts], Awaitable[object]], *args: *Ts
) -> None:
    """Start a task that outlives the request which needs it first, such as a connection.

    A task gets the fields of who starts it; this one's lines are not that request's.
    """
    context = copy_context()
    context.run(_scope.set, _EMPTY)
    context.run(partial(nursery.start_soon, work, *args))


def name_process(**fields: Any) -> None:
    _process.update(fields)


def current_fields() -> dict[str, Any]:
    """What a line written here and now gets; the scope's own win."""
    return {**_process, **_scope.get()}
