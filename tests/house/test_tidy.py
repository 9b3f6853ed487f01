"""House rules that a linter does not hold: size, names, docstrings, order, clock and dice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import (
    ROOT,
    Source,
    all_sources,
    front_door,
    imports,
    is_generated,
    listed,
    nodes_of,
    other_files,
    sources,
    tree_of,
)

LINES_MAX = 600
STATEMENTS_MAX = 60
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "misc", "manager"}

# What runs in the simulator: here order, clock and dice decide whether a seed replays.
SIMULATED = ("runtime", "transports.tcp", "transports.memory", "sim")
# The one place that may read the machine's clocks and dice.
THE_SEAM = "runtime.env"
# Reading the clock off the main loop: these files do not run in the simulator.
OUTSIDE_THE_SIMULATION: tuple[str, ...] = ("runtime.engines.", "sim.isolation.")
FORBIDDEN_CALLS = {
    "time": {"time", "monotonic", "perf_counter", "sleep", "time_ns", "monotonic_ns"},
    "random": {"random", "choice", "choices", "randint", "shuffle", "sample", "uniform", "getrandbits", "randbytes"},
    "uuid": {"uuid1", "uuid4"},
    "os": {"urandom", "getrandom"},
    "secrets": {"token_hex", "token_bytes", "token_urlsafe", "choice", "randbelow"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}  # fmt: skip
# What takes a set and does not care for its order.
ORDERLESS = {"sorted", "any", "all", "sum", "min", "max", "len", "set", "frozenset", "bool"}


def simulated_sources() -> Iterator[Source]:
    for source in all_sources():
        if any(f"{source.module}.".startswith(f"{prefix}.") for prefix in SIMULATED):
            yield source


def python_files() -> list[Path]:
    return [source.path for source in all_sources()] + [
        path for path in other_files() if not is_generated(path)
    ]


def test_no_file_is_longer_than_a_reader_s_patience() -> None:
    long = [
        f"{name}: {lines} lines"
        for path in python_files()
        if (name := path.relative_to(ROOT).as_posix())
        if (lines := len(path.read_text("utf-8").splitlines())) > LINES_MAX
    ]

    assert not long, listed(long)


def statements(function: ast.AST) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1


def test_no_function_has_more_statements_than_fit_in_a_head() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {count}"
        for path in python_files()
        for node in nodes_of(tree_of(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        # The formatter gives each statement a line.
        if (node.end_lineno or 0) - node.lineno >= STATEMENTS_MAX
        if (count := statements(node)) > STATEMENTS_MAX
    ]

    assert not long, listed(long)


def test_no_module_is_named_after_nothing() -> None:
    named = [
        path.relative_to(ROOT).as_posix()
        for path in python_files()
        if not BANNED_NAMES.isdisjoint({path.stem, path.parent.name})
    ]

    assert not named, listed(named)


def test_every_module_says_what_it_is_for() -> None:
    """Tests may leave it to their names; everything else has a docstring."""
    silent = [
        path.relative_to(ROOT).as_posix()
        for path in python_files()
        if path.relative_to(ROOT).parts[0] != "tests"
        if ast.get_docstring(tree_of(path)) is None
    ]

    assert not silent, listed(silent)


def test_every_package_of_the_runtime_has_an_init() -> None:
    """Without one it is a namespace package, which a wheel leaves out without a word."""
    folders = {source.path.parent for source in all_sources()}

    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_no_module_is_dead() -> None:
    """Each is public, imported by another one, run with `-m`, or, in `sim`, used by tests."""
    readers = [*all_sources(), front_door()]
    used = {each.target.removeprefix("trinamo.") for s in readers for each in imports(s)}
    tests = {
        each.target.removeprefix("trinamo.")
        for path in other_files()
        for each in imports(Source(path, path.stem, is_package=False, tree=tree_of(path)))
    }
    dead = [
        source.name
        for source in all_sources()
        if not source.is_package
        and source.path.stem != "__main__"
        # The console script, and what the pytest plugin uses, which stands outside.
        and source.module not in {"cli.main", "sim.own.marked", "sim.own.drawn"}
        and '__name__ == "__main__"' not in source.path.read_text("utf-8")
        and not any(
            f"{name}.".startswith(f"{source.module}.")
            for name in (used | tests if source.module.startswith("sim.") else used)
        )
    ]

    assert not dead, listed(dead)


# --- order -------------------------------------------------------------------------------------


def is_set(node: ast.expr) -> bool:
    """Whether the expression is plainly a set: a literal, a comprehension, or made by `set(…)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in {"list", "tuple", "iter", "enumerate", "reversed"} and node.args:
            return is_set(node.args[0])
        return node.func.id in {"set", "frozenset"}
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitOr, ast.BitAnd, ast.Sub)):
        return is_set(node.left) or is_set(node.right)
    return isinstance(node, (ast.Set, ast.SetComp))


def set_iterations(tree: ast.Module) -> Iterator[int]:
    """Lines where the arbitrary order of a set can be seen."""
    orderless = {
        id(node.args[0])
        for node in nodes_of(tree)
        if isinstance(node, ast.Call) and node.args
        if isinstance(node.func, ast.Name) and node.func.id in ORDERLESS
    }
    for node in nodes_of(tree):
        iterated: list[ast.expr] = []
        if isinstance(node, (ast.For, ast.AsyncFor)):
            iterated = [node.iter]
        elif isinstance(node, (ast.ListComp, ast.DictComp, ast.GeneratorExp)):
            iterated = [] if id(node) in orderless else [each.iter for each in node.generators]
        if any(is_set(each) for each in iterated):
            yield iterated[0].lineno


def test_nothing_simulated_iterates_over_a_set() -> None:
    """The order of a set of strings changes with every process; a dict keeps insertion order."""
    wrong = [
        f"{source.name}:{line}"
        for source in simulated_sources()
        for line in set_iterations(source.tree)
    ]

    assert not wrong, listed(wrong)


@pytest.mark.parametrize(
    "code",
    [
        "for x in {1, 2}: pass",
        "for x in set(y): pass",
        "for i, x in enumerate({a for a in b}): pass",
        "for x in set(a) - b: pass",
        "z = [x for x in frozenset(y)]",
        "z = ','.join(x for x in set(y))",
    ],
)
def test_an_iteration_over_a_set_is_found(code: str) -> None:
    assert list(set_iterations(ast.parse(code))) == [1]


@pytest.mark.parametrize(
    "code", ["for x in sorted({1}): pass", "any(x for x in {1})", "z = {x for x in set(y)}"]
)
def test_an_iteration_whose_order_nobody_sees_is_left_alone(code: str) -> None:
    assert list(set_iterations(ast.parse(code))) == []


# --- clock and dice ----------------------------------------------------------------------------


def forbidden_calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Uses of the machine's clocks and dice, by attribute or by `from x import y`."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute)):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if node.attr in FORBIDDEN_CALLS.get(owner, set()):
                yield node.lineno, f"{owner}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                if alias.name in FORBIDDEN_CALLS.get(node.module or "", set()):
                    yield node.lineno, f"{node.module}.{alias.name}"


def test_clock_and_dice_come_from_the_environment() -> None:
    """`env.clock` and `env.rng`: the simulator owns both, so a seed replays a run."""
    wrong = [
        f"{source.name}:{line}: {call}"
        for source in simulated_sources()
        if source.module != THE_SEAM and not source.module.startswith(OUTSIDE_THE_SIMULATION)
        for line, call in forbidden_calls(source.tree)
    ]

    assert not wrong, listed(wrong)


@pytest.mark.parametrize(
    "code",
    ["time.monotonic()", "datetime.datetime.now()", "from uuid import uuid4", "random.choice(x)"],
)
def test_a_call_to_clock_or_dice_is_found(code: str) -> None:
    assert list(forbidden_calls(ast.parse(code)))


def test_a_generator_with_its_own_seed_is_left_alone() -> None:
    assert list(forbidden_calls(ast.parse("random.Random(7).choice(x)"))) == []


# --- exception groups --------------------------------------------------------------------------


def bare_nurseries(tree: ast.Module) -> Iterator[int]:
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and node.attr == "open_nursery":
            yield node.lineno


def test_nurseries_are_opened_by_the_one_rule_for_exception_groups() -> None:
    """trio's own turns every error into a group; `runtime/nurseries.py` lets one error out."""
    wrong = [
        f"{source.name}:{line}: use open_nursery of runtime.nurseries"
        for source in all_sources()
        if source.module.startswith(("runtime", "transports", "cli"))
        if source.module != "runtime.nurseries"
        for line in bare_nurseries(source.tree)
    ]

    assert not wrong, listed(wrong)
    assert list(bare_nurseries(ast.parse("async with trio.open_nursery() as n:\n    pass")))


def test_the_generated_files_are_those_we_know() -> None:
    generated = {
        path.name
        for path in (ROOT / "transports").rglob("*.py*")
        if is_generated(path) and path.suffix in (".py", ".pyi")
    }

    assert generated <= {"wire_pb2.py", "wire_pb2.pyi"}
    assert sources("runtime"), "the tests look at real files"


def test_every_news_fragment_has_a_name_that_the_changelog_understands() -> None:
    """`<issue>.<kind>.md`, or `+<word>.<kind>.md`: of any other the changelog makes an issue."""
    wrong = [
        path.name
        for path in (ROOT / "changes").glob("*.md")
        if not re.fullmatch(r"(\d+|\+[a-z0-9-]+)\.(added|changed|fixed|removed)\.md", path.name)
    ]

    assert not wrong, listed(wrong)


def test_no_file_keeps_the_marks_of_a_merge() -> None:
    """Python files would not load with them; pages, settings and scripts would be shipped."""
    folders = (
        "runtime",
        "transports",
        "sim",
        "src",
        "docs",
        "changes",
        "deploy",
        "examples",
        "bench",
        "tests",
    )
    kinds = {".md", ".toml", ".yaml", ".yml", ".txt", ".html", ".css", ".js", ".json", ".sh"}
    files = [
        *(path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".")),
        *(path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in kinds),
    ]
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1)
        if line.startswith(("<" * 7 + " ", ">" * 7 + " "))
    ]

    assert ROOT / "README.md" in files
    assert not wrong, listed(wrong)
