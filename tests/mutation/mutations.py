"""What is changed: one small mistake at a time, found in the syntax tree and put into the text.

A mutation is a mistake that a hand could make: a bound off by one, a condition turned round, a
line left out. What nothing observes is left alone: logging, assertions, annotations, docstrings,
names that a module exports.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Final

import attrs

_COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_UNOBSERVED: Final = frozenset({"_log", "warnings"})


@attrs.frozen
class Mutation:
    """`before`, at `line` and `start` to `end` in the text, becomes `after`."""

    line: int
    start: int
    end: int
    """Offsets in the module's UTF-8 bytes."""
    before: str
    after: str

    def apply(self, text: bytes) -> bytes:
        """The module with this mistake in it."""
        return text[: self.start] + self.after.encode() + text[self.end :]


def mutations(text: bytes) -> list[Mutation]:
    """All mutations of a module, in the order of its lines."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def mutation(node: ast.expr | ast.stmt, after: str) -> Mutation:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        return Mutation(node.lineno, start, end, text[start:end].decode(), after)

    found = [
        mutation(place, after)
        for node in _observed(ast.parse(text))
        for mutate in _MUTATORS
        for place, after in mutate(node)
    ]
    return sorted(found, key=lambda each: (each.start, each.end))


def _observed(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The statements and expressions below `node` whose change a caller could notice."""
    for child in _parts(node):
        if not _is_unobserved(child):
            if isinstance(child, (ast.expr, ast.stmt)):
                yield child
            yield from _observed(child)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """The children that run: neither annotations nor decorators nor the pieces of f-strings."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body)
        case ast.ClassDef():
            yield from node.body
        case ast.AnnAssign():
            if node.value is not None:
                yield node.value
        case ast.JoinedStr():
            pass
        case _:
            yield from ast.iter_child_nodes(node)


def _is_unobserved(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Raise():
            # That something is raised is tested by the condition before it.
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in _UNOBSERVED
        case _:
            return False


_Change = tuple[ast.expr | ast.stmt, str]
"""What is replaced, and the text that takes its place."""


def _compare(node: ast.AST) -> Iterator[_Change]:
    """A bound off by one, a test for the opposite."""
    if isinstance(node, ast.Compare):
        ops = [_COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
        yield node, f"({ast.unparse(ast.Compare(node.left, ops, node.comparators))})"


def _calculate(node: ast.AST) -> Iterator[_Change]:
    """The wrong one of two related operators."""
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        other = ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
        yield node, f"({ast.unparse(other)})"


def _join(node: ast.AST) -> Iterator[_Change]:
    """`and` for `or`, and one part of either forgotten."""
    if isinstance(node, ast.BoolOp):
        op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, f"({ast.unparse(ast.BoolOp(op, node.values))})"
        for number in range(len(node.values)):
            left = [value for i, value in enumerate(node.values) if i != number]
            yield node, f"({ast.unparse(left[0] if len(left) == 1 else ast.BoolOp(node.op, left))})"


def _turn_round(node: ast.AST) -> Iterator[_Change]:
    """A condition that means its opposite; comparisons have that already."""
    if isinstance(node, (ast.If, ast.IfExp)) and not isinstance(node.test, ast.Compare):
        yield node.test, f"(not ({ast.unparse(node.test)}))"


def _miscount(node: ast.AST) -> Iterator[_Change]:
    """A number off by one, a flag the wrong way round."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, repr(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield node, repr(node.value + 1)


def _leave_out(node: ast.AST) -> Iterator[_Change]:
    """A statement forgotten: a call, or state that is not written."""
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield node, "pass"
        case ast.Continue():
            yield node, "break"
        case ast.Break():
            yield node, "continue"
        case _:
            pass


_MUTATORS: Final[tuple[Callable[[ast.AST], Iterator[_Change]], ...]] = (
    _compare,
    _calculate,
    _join,
    _turn_round,
    _miscount,
    _leave_out,
)
