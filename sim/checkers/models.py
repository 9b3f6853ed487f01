"""What objects do when nobody else is there: specifications for `Linearizability`.

    history = world.watch(Linearizability(models.queue))

A specification takes the state before an operation, the operation's name and its arguments, and gives
the state after it and what it returns. Every model here takes None for the state of a new object. What
it cannot do in a state (take a lock that is held) returns `IMPOSSIBLE`, which no client ever got.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final

Specification = Callable[..., tuple[Hashable, Any]]
"""`specification(state, name, *arguments)`: the state after the operation, and what it returns."""
IMPOSSIBLE: Final = object()
"""What an operation returns that cannot happen in this state; equal to no result."""


def register(state: Hashable, name: str, *arguments: Any) -> tuple[Hashable, Any]:
    """One value: `read`, `write(value)`, and `cas(expected, value)`, which says whether it wrote.

    With a key for each operation it is a key-value store.
    """
    if name == "read":
        return state, state
    if name == "write":
        return arguments[0], None
    if name == "cas":
        is_equal = state == arguments[0]
        return (arguments[1] if is_equal else state), is_equal
    raise _unknown("register", name)


def kv(state: Any, name: str, *arguments: Any) -> tuple[Hashable, Any]:
    """Values by key: `get(key)`, `put(key, value)`, `delete(key)`, `cas(key, expected, value)`, `items()`.

    What is absent is None. `items` gives a frozenset of pairs. If no operation is about more than one
    key, a `register` with `key=` is the same and far cheaper to judge.
    """
    entries = dict(state or ())
    if name == "items":
        return state, frozenset(entries.items())
    if name not in ("get", "put", "delete", "cas"):
        raise _unknown("kv", name)
    key, *values = arguments
    before = entries.get(key)
    if name == "get":
        return state, before
    if name == "cas" and before != values[0]:
        return state, False
    value = values[-1] if values else None
    if value is None:
        entries.pop(key, None)
    else:
        entries[key] = value
    return frozenset(entries.items()), True if name == "cas" else None


def queue(state: Any, name: str, *arguments: Any) -> tuple[Hashable, Any]:
    """First in, first out: `put(value)`, and `get()`, which returns None if nothing is there."""
    values = state or ()
    if name == "put":
        return (*values, arguments[0]), None
    if name == "get":
        return values[1:], values[0] if values else None
    raise _unknown("queue", name)


def set_(state: Any, name: str, *arguments: Any) -> tuple[Hashable, Any]:
    """Values without order: `add(value)`, `remove(value)`, `contains(value)`, `read()` (a frozenset)."""
    values: frozenset[Any] = state or frozenset()
    if name == "add":
        return values | {arguments[0]}, None
    if name == "remove":
        return values - {arguments[0]}, None
    if name == "contains":
        return values, arguments[0] in values
    if name == "read":
        return values, values
    raise _unknown("set_", name)


def mutex(state: Hashable, name: str, *arguments: Any) -> tuple[Hashable, Any]:
    """A lock: `acquire(owner)`, `try_acquire(owner)`, which says whether it got it, `release(owner)`."""
    if name not in ("acquire", "try_acquire", "release"):
        raise _unknown("mutex", name)
    (owner,) = arguments
    if name == "release":
        return (None, None) if state == owner else (state, IMPOSSIBLE)
    if state is None:
        return owner, True if name == "try_acquire" else None
    return state, False if name == "try_acquire" else IMPOSSIBLE


def counter(state: Any, name: str, *arguments: Any) -> tuple[Hashable, Any]:
    """A number from 0: `add(n)`, `read()`, and `add_and_get(n)`, which returns the number after it."""
    number = state or 0
    if name == "read":
        return number, number
    if name == "add":
        return number + arguments[0], None
    if name == "add_and_get":
        return number + arguments[0], number + arguments[0]
    raise _unknown("counter", name)


_OPERATIONS: Final = {
    "register": "read, write and cas",
    "kv": "get, put, delete, cas and items",
    "queue": "put and get",
    "set_": "add, remove, contains and read",
    "mutex": "acquire, try_acquire and release",
    "counter": "add, read and add_and_get",
}


def _unknown(model: str, name: str) -> ValueError:
    return ValueError(f"a {model.strip('_')} has {_OPERATIONS[model]}, not {name!r}")
