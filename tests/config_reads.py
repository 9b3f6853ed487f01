"""Which fields of a structure the product reads: found in its sources, not by running it.

A small inference of types: a name is a section of the configuration where its annotation says so, or
where it was assigned from an expression that is one. A key is read where its attribute is taken of
its own section, so `tcp.ack_timeout_s` does not count for `nats.ack_timeout_s`. What a loop over all
names reads cannot be seen here: `test_config_keys.py` says where those loops are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from trinamo.runtime.config.keys import Section

Kind = type[Any]


def fields_read(roots: Mapping[str, Kind], sources: Iterable[Path]) -> set[str]:
    """The dotted names of fields below `roots` that the sources read.

    `roots` gives the name that each structure's fields get; those of a structure inside another
    follow with a dot. Structures are told apart by class: one that stands at two places is read at
    both or at none.
    """
    places: dict[Kind, list[str]] = {}
    for name, root in roots.items():
        for prefix, kind in _below(name, root):
            places.setdefault(kind, []).append(prefix)
    reader = _Reader({kind.__name__: kind for kind in places})
    trees = [ast.parse(path.read_text("utf-8")) for path in sources]
    # Twice: an attribute may be read in a file before the one that assigns it.
    for tree in [*trees, *trees]:
        reader.visit(tree)
    return {f"{prefix}{name}" for kind, name in reader.reads for prefix in places[kind]}


def _below(prefix: str, kind: Kind) -> Iterator[tuple[str, Kind]]:
    yield prefix, kind
    for name, hint in _hints(kind).items():
        if isinstance(hint, type) and issubclass(hint, Section):
            yield from _below(f"{prefix}{name}.", hint)


_known: dict[Kind, dict[str, Any]] = {}


def _hints(kind: Kind) -> dict[str, Any]:
    if kind not in _known:
        _known[kind] = get_type_hints(kind)
    return _known[kind]


class _Reader(ast.NodeVisitor):
    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self.kinds = kinds
        self.own: Kind | None = None
        self.names: dict[str, set[Kind]] = {}
        # By attribute, of whatever object: `self._options` may hold one thing here, another there.
        self.attributes: dict[str, set[Kind]] = {}
        self.reads: set[tuple[Kind, str]] = set()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.own = self.kinds.get(node.name)
        self.generic_visit(node)
        self.own = None

    def visit_Lambda(self, node: ast.Lambda) -> None:
        # `attrs.Factory(lambda options: …, takes_self=True)` in the structure itself.
        outer = dict(self.names)
        if self.own is not None and len(node.args.args) == 1:
            self.names[node.args.args[0].arg] = {self.own}
        self.generic_visit(node)
        self.names = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer = dict(self.names)
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            self.names[argument.arg] = self.named(argument.annotation)
        if self.own is not None:
            self.names["self"] = {self.own}
        self.generic_visit(node)
        self.names = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 -- the visitor's name

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        for kind in self.named(node.annotation):
            if isinstance(node.target, (ast.Name, ast.Attribute)):
                name = node.target.id if isinstance(node.target, ast.Name) else node.target.attr
                self.attributes.setdefault(name, set()).add(kind)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._bind(target, node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self._read(node.value, node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        # `getattr(section, "port")`, and functions of ours that take a section and names.
        texts = [each.value for each in node.args[1:] if isinstance(each, ast.Constant)]
        for text in texts:
            if isinstance(text, str):
                self._read(node.args[0], text)
        self.generic_visit(node)

    def _read(self, value: ast.expr, name: str) -> None:
        self.reads |= {(kind, name) for kind in self.kinds_of(value) if name in _hints(kind)}

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ast.Tuple(elts=targets), ast.Tuple(elts=values):
                for each, given in zip(targets, values, strict=False):
                    self._bind(each, given)
            case ast.Name(id=name), _:
                self.names[name] = self.kinds_of(value)
            case ast.Attribute(attr=name), _:
                self.attributes.setdefault(name, set()).update(self.kinds_of(value))
            case _:
                pass

    def named(self, annotation: ast.expr | None) -> set[Kind]:
        """The structures that an annotation names, alone or among others."""
        nodes = [] if annotation is None else list(ast.walk(annotation))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        names |= {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
        return {self.kinds[name] for name in names if name in self.kinds}

    def kinds_of(self, value: ast.expr) -> set[Kind]:
        """What an expression may be, of the structures looked at."""
        match value:
            case ast.Name(id=name):
                return self.names.get(name, set())
            case ast.Attribute(value=inner, attr=name):
                outer = self.kinds_of(inner)
                if not outer:
                    return self.attributes.get(name, set())
                held: list[Any] = [_hints(kind).get(name) for kind in outer]
                return {kind for kind in held if kind in self.kinds.values()}
            case ast.Call(func=ast.Attribute(attr="replace" | "evolve"), args=[first, *_]):
                return self.kinds_of(first)
            case ast.Call(func=ast.Attribute(attr="load")):
                return self.named(ast.Name("Config"))
            case ast.IfExp(body=one, orelse=other):
                return self.kinds_of(one) | self.kinds_of(other)
            case _:
                return set()
