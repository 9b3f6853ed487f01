"""The repository's own Python files as the house-rule tests see them: paths, names, syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[1]
# The import packages and where their files are.
PACKAGES = {
    "runtime": ROOT / "runtime",
    "transports": ROOT / "transports",
    "sim": ROOT / "sim",
    "cli": ROOT / "src" / "trinamo" / "cli",
    "conformance": ROOT / "src" / "trinamo" / "conformance",
}
GENERATED = ("wire_pb2",)


@attrs.frozen
class Source:
    """One file. `module` is its dotted name below `trinamo`, such as `runtime.http.server`."""

    path: Path
    module: str
    is_package: bool
    tree: ast.Module = attrs.field(repr=False, eq=False)

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def package(self) -> str:
        """What a relative import with one dot starts from."""
        return self.module if self.is_package else self.module.rpartition(".")[0]

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(_imports(self))


@attrs.frozen
class Import:
    """One imported module: `target` is absolute; `level` says how many dots were written."""

    target: str
    level: int
    line: int


def listed(lines: Iterable[str]) -> str:
    """What a failing rule prints: every place, one a line."""
    return "\n".join(["", *lines])


def is_generated(path: Path) -> bool:
    return path.stem.startswith(GENERATED)


@cache
def tree_of(path: Path) -> ast.Module:
    """What stands in a file; each is parsed once for all rules."""
    return ast.parse(path.read_text("utf-8"), str(path))


@cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """As `ast.walk` gives them, once for all rules: a walk costs as much as the parse."""
    return tuple(ast.walk(tree))


@cache
def sources(package: str) -> tuple[Source, ...]:
    """Every file of one package that people wrote, in the order of names."""
    base = PACKAGES[package]
    return tuple(
        _source(path, base, package)
        for path in sorted(base.rglob("*.py"))
        if not is_generated(path) and "__pycache__" not in path.parts
    )


def all_sources() -> Iterator[Source]:
    for package in PACKAGES:
        yield from sources(package)


@cache
def other_files() -> tuple[Path, ...]:
    """Tests, properties, benchmarks, examples and what makes pages of the documentation."""
    folders = ("tests", "properties", "bench", "examples", "docs")
    return tuple(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


def _source(path: Path, base: Path, package: str) -> Source:
    parts = [package, *path.relative_to(base).with_suffix("").parts]
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    return Source(path, module, is_package, tree_of(path))


def forget() -> None:
    """Let go of all that was parsed."""
    for each in (tree_of, nodes_of, sources):
        each.cache_clear()


def front_door() -> Source:
    """What is public: the stub of the import name."""
    path = ROOT / "src" / "trinamo" / "__init__.pyi"
    return Source(path, "", is_package=True, tree=tree_of(path))


def imports(source: Source) -> tuple[Import, ...]:
    """Every import of the file, also those inside functions and `TYPE_CHECKING` blocks.

    `from x import y` gives `x.y`: whether y is a module or a name in x, the rules treat it alike.
    """
    return source.imports


def _imports(source: Source) -> Iterator[Import]:
    for node in nodes_of(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, 0, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                above = source.package.split(".")[: len(source.package.split(".")) - node.level + 1]
                origin = ".".join(filter(None, ["trinamo", *above, origin]))
            for alias in node.names:
                yield Import(f"{origin}.{alias.name}", node.level, node.lineno)
