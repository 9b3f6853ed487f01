"""Fields that every line of a scope, or of the whole process, gets: `request_id`, `instance_id`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

__all__ = ["add_fields", "current_fields", "log_fields", "name_process", "name_task"]

_EMPTY: Final[dict[str, Any]] = {}
_scope: ContextVar[dict[str, Any]] = ContextVar("log_fields", default=_EMPTY)
_process: dict[str, Any] = {}


@contextmanager
def log_fields(**fields: Any) -> Iterator[None]:
    """Add fields to every line of this scope and of the tasks that are started in it."""
    token = _scope.set({**_scope.get(), **fields})
    try:
        yield
    finally:
        _scope.reset(token)


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


def name_process(**fields: Any) -> None:
    """Add fields to every line of this process from now on."""
    _process.update(fields)


def current_fields() -> dict[str, Any]:
    """What a line written here and now gets; the scope's own win."""
    return {**_process, **_scope.get()}
