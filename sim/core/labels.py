"""The points that the code of a run is to reach, read from its source: `reached("label")`.

Code counts if a process of the run began in its module, or in one that imports it. What this module
does not do: see labels that are no plain text. Read next: `trinamo/points.py`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from types import FunctionType, ModuleType

from trinamo import points


def module_of(part: object) -> str:
    """The module in which a function, or the class of an object, is written."""
    while isinstance(part, partial):
        part = part.func
    name = getattr(part, "__module__", None)
    return name if isinstance(name, str) else type(part).__module__


def labels_below(roots: Iterable[str]) -> frozenset[str]:
    """The labels in these modules and in all that they import, directly or not."""
    return _labels_below(frozenset(roots), len(sys.modules))


@lru_cache(maxsize=256)
def _labels_below(roots: frozenset[str], loaded: int) -> frozenset[str]:
    pointed = _modules_with_points(loaded)
    # Few programs have any, and then nobody need look who imports whom.
    below = _below(roots) if pointed else set()
    return frozenset(label for name in pointed if name in below for label in _labels(name))


@lru_cache(maxsize=1)
def _modules_with_points(loaded: int) -> list[str]:  # noqa: ARG001 -- when to look anew
    return [
        name
        for name, module in list(sys.modules.items())
        if not name.startswith(("trinamo.points", "trinamo.sim"))
        and any(each is points or each is points.reached for each in _values(module))
    ]


def _values(module: object) -> Iterator[object]:
    return iter(tuple(vars(module).values())) if isinstance(module, ModuleType) else iter(())


def _below(roots: frozenset[str]) -> set[str]:
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for each in _values(sys.modules.get(name)):
            if isinstance(each, ModuleType):
                waiting.append(each.__name__)
            elif isinstance(each, (FunctionType, type)):
                waiting.append(module_of(each))
    return seen


@lru_cache(maxsize=1024)
def _labels(name: str) -> frozenset[str]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (KeyError, OSError, TypeError, ValueError, SyntaxError):
        # Its source is not at hand.
        return frozenset()
    own = vars(sys.modules[name])
    return frozenset(
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
        and _is_reached(node.func, own)
    )


def _is_reached(function: ast.expr, own: dict[str, object]) -> bool:
    if isinstance(function, ast.Name):
        return own.get(function.id) is points.reached
    return isinstance(function, ast.Attribute) and function.attr == "reached"
