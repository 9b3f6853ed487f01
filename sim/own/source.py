"""What somebody's file holds of scenario functions: read as text first, then imported.

A file is read before it is imported: nothing is called but a public function at its top that takes
the parts of a run by name. What this module does not do: play one (`scenario.py`).
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from ..explore.run import BadScenario

PARTS = ("choices", "world", "network")
ALL_PARTS = "`choices`, `world`, `network`"
FILE_BYTES_MAX = 5_000_000
FILES_MAX = 100
_Function = ast.FunctionDef | ast.AsyncFunctionDef


# --- as text -------------------------------------------------------------------------------------


def functions_of(path: Path) -> list[str]:
    """The scenario functions of a file, as they stand in it; `BadScenario` if it cannot be read."""
    return [node.name for node in _functions(path) if _is_scenario(node)]


def _functions(path: Path) -> Iterator[_Function]:
    return (node for node in _tree(path).body if isinstance(node, _Function))


def _tree(path: Path) -> ast.Module:
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadScenario(f"{path} cannot be read: {error.strerror}") from error
    if len(raw) > FILE_BYTES_MAX:
        raise BadScenario(f"{path} is larger than {FILE_BYTES_MAX} bytes")
    try:
        return ast.parse(raw, str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        where = f"{path}, line {line}" if line else str(path)
        raise BadScenario(f"{where} is no Python: {getattr(error, 'msg', error)}") from error


def _is_scenario(node: _Function) -> bool:
    return not _objection(node.name, _takes(node), _needed(node))


def _takes(node: _Function) -> set[str]:
    return {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def _needed(node: _Function) -> set[str]:
    """The parameters that have no default."""
    spec = node.args
    positional = [*spec.posonlyargs, *spec.args]
    needed = positional[: len(positional) - len(spec.defaults)]
    needed += [
        each for each, at in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if at is None
    ]
    return {each.arg for each in needed}


def check_in_file(path: Path, name: str) -> None:
    """`BadScenario` unless the file defines a scenario function of this name."""
    nodes = {node.name: node for node in _functions(path)}
    node = nodes.get(name)
    if node is None:
        known = [each.name for each in nodes.values() if _is_scenario(each)]
        hint = f"it has {', '.join(known)}" if known else f"one takes {ALL_PARTS} or some of them"
        raise BadScenario(f"{path} has no function {name!r}; {hint}")
    if objection := _objection(f"{path}::{name}", _takes(node), _needed(node)):
        raise BadScenario(objection)


def _objection(label: str, takes: set[str], needed: set[str]) -> str:
    """Why a function that takes and needs these is no scenario; empty if it is one."""
    if label.rpartition("::")[2].startswith("_"):
        return f"{label} is private; give it a name without an underscore"
    if strange := sorted(needed - {*PARTS}):
        return (
            f"{label} takes {', '.join(strange)}: a scenario takes {ALL_PARTS},"
            " and everything else it takes must have a default"
        )
    if takes.isdisjoint(PARTS):
        return f"{label} takes none of {ALL_PARTS}, so there is no world to play it in"
    return ""


def check_callable(function: Callable[..., object]) -> None:
    """`BadScenario` unless this can be called as a scenario."""
    if not callable(function):
        raise BadScenario(f"a scenario is a function, and this is a {type(function).__name__}")
    takes = inspect.signature(function).parameters
    needed = {
        name
        for name, each in takes.items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    label = getattr(function, "__name__", "the scenario").lstrip("_")
    if objection := _objection(label, set(takes), needed):
        raise BadScenario(objection)


def digest_of(path: Path) -> str:
    """A checksum of the file; `BadScenario` if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise BadScenario(f"{path} cannot be read: {error.strerror}") from error


def in_words(error: BaseException) -> str:
    """An error, and the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def checks(path: Path) -> bool:
    """Whether the file, or one beside it that it imports, has anything that may find fault with a run."""
    seen: set[Path] = set()
    waiting = [path]
    while waiting and len(seen) < FILES_MAX:
        file = waiting.pop()
        seen.add(file)
        for node in ast.walk(_tree(file)):
            if _may_object(node):
                return True
            beside = [file.parent.joinpath(*name.split(".")) for name in _imported(node)]
            files = [each for to in beside for each in (to.with_suffix(".py"), to / "__init__.py")]
            waiting += [each for each in files if each.is_file() and each not in seen]
    return False


def _may_object(node: ast.AST) -> bool:
    if isinstance(node, (ast.Assert, ast.Raise)):
        return True
    if isinstance(node, ast.ImportFrom):
        return "check" in (node.module or "") or any(
            "check" in each.name.lower() for each in node.names
        )
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return isinstance(name, str) and ("check" in name.lower() or "assert" in name.lower())


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom):
        module = f"{node.module}." if node.module else ""
        return [
            *([node.module] if node.module else []),
            *(f"{module}{each.name}" for each in node.names),
        ]
    return []


# --- imported ------------------------------------------------------------------------------------

_modules: dict[Path, ModuleType] = {}
"""By file, so that a run need not look for it."""


def loaded_function(path: Path, name: str) -> Callable[..., object]:
    module = _loaded(path.resolve(), name)
    function = getattr(module, name, None)
    if function is None:
        raise BadScenario(f"{path} does not define {name} when it is imported")
    check_callable(function)
    return function  # type: ignore[no-any-return]


def _loaded(path: Path, name: str) -> ModuleType:
    """The module of this file: the one that is imported already, or a new one."""
    module = _modules.get(path)
    if module is not None and sys.modules.get(module.__name__) is module:
        return module
    for module in list(sys.modules.values()):
        known = str(getattr(module, "__file__", None))
        if not (known.endswith(path.name) and hasattr(module, name)):
            continue
        if Path(known).resolve() == path:
            _modules[path] = module
            return module
    check_in_file(path, name)
    # The folder to import from, and the module's name seen from it, packages included.
    folder, parts = path.parent, [path.stem]
    while (folder / "__init__.py").is_file() and folder.parent != folder:
        parts.insert(0, folder.name)
        folder = folder.parent
    root, dotted = folder, ".".join(parts)
    if str(root) not in sys.path:
        # As Python does for a script: what lies beside it can be imported.
        sys.path.insert(0, str(root))
    if dotted in sys.modules:
        dotted = f"{path.stem}_{digest_of(path)}"
    spec = importlib.util.spec_from_file_location(dotted, path)
    if spec is None or spec.loader is None:
        raise BadScenario(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[dotted] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[dotted]
        raise BadScenario(f"{path} cannot be imported: {in_words(error)}") from error
    _modules[path] = module
    return module
