"""What the guard cannot catch at run time is kept out of simulated code by reading it.

A clock kept in a closure, a default or a class attribute before the run is never looked up again; the
clocks of numpy are C, and so is the order in which an object's address, or the hash of a text, puts
things.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.sources import Source, all_sources, listed

SIMULATED = ("runtime", "transports.tcp", "transports.memory", "sim")
# Not run in a world: real time, real files, real models, and the front of a real process.
OUTSIDE = (
    "runtime.env",
    "runtime.engines.",
    "runtime.config",
    "sim.isolation.",
    "sim.explore.",
)
# Modules whose functions must be looked up when called, so that the guard can be in between.
AMBIENT = ("time", "random", "uuid", "secrets", "os", "socket")
HARMLESS = {
    "random": {"Random"},
    "uuid": {"UUID"},
    "os": {"PathLike", "environ", "fspath", "fsync", "sep", "pathsep", "strerror"},
}
UNORDERED = {"id", "hash"}


def simulated_sources() -> Iterator[Source]:
    for source in all_sources():
        name = f"{source.module}."
        inside = tuple(f"{each}." for each in SIMULATED)
        if name.startswith(inside) and not name.startswith(OUTSIDE):
            yield source


def escapes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines with something that no stand-in reaches, and what."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module in AMBIENT:
            for alias in node.names:
                if alias.name not in HARMLESS.get(node.module, set()):
                    yield node.lineno, f"from {node.module} import {alias.name}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            what = kept(node.value.id, node.attr, is_called=id(node) in called)
            if what:
                yield node.lineno, what
        elif isinstance(node, ast.keyword) and node.arg == "key":
            name = node.value.id if isinstance(node.value, ast.Name) else ""
            if name in UNORDERED:
                yield node.value.lineno, f"sorted by {name}"


def kept(owner: str, name: str, *, is_called: bool) -> str:
    """What is wrong with `owner.name`, if anything."""
    is_function = name.islower() and name not in HARMLESS.get(owner, set())
    if owner in ("time", "random", "secrets") and is_function and not is_called:
        return f"{owner}.{name} kept for later"
    return ""


@pytest.mark.check
def test_nothing_simulated_keeps_a_clock_or_dice_where_the_guard_does_not_reach() -> None:
    wrong = [
        f"{source.name}:{line}: {what}"
        for source in simulated_sources()
        for line, what in escapes(source.tree)
    ]

    assert not wrong, listed(wrong)


@pytest.mark.parametrize(
    "code",
    [
        "from time import monotonic",
        "from random import choice",
        "from os import urandom",
        "def f(clock=time.monotonic): pass",
        "class A:\n    now = time.time",
        "shuffle = random.shuffle",
        "sorted(x, key=id)",
        "x.sort(key=hash)",
    ],
)
def test_an_escape_is_found(code: str) -> None:
    assert len(list(escapes(ast.parse(code)))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "from random import Random",
        "random.Random(7).choice(x)",
        "time.time()",
        "sorted(x, key=len)",
    ],
)
def test_what_the_guard_catches_or_cannot_matter_is_left_alone(code: str) -> None:
    assert list(escapes(ast.parse(code))) == []
