"""An engine by name: `module:attribute`, or `path/to/file.py:attribute`.

The module is code of whoever starts the process, and runs as such.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import ConfigError
from .definition import EngineDefinition, defined
from .telling import told


def load_engine(name: str) -> EngineDefinition:
    """Import what `name` means; raises `ConfigError` with a sentence that says what is wrong.

    Modules are looked for in the current folder first; a file's neighbours can be imported by it.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ConfigError(f"{name!r} names no engine; write module:attribute or file.py:attribute")
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"engine {name} does not import: {told(error)}") from error
    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            engines = (
                each for each, value in vars(module).items() if isinstance(value, EngineDefinition)
            )
            there = ", ".join(engines) or "none is decorated with @trinamo.engine"
            raise ConfigError(
                f"engine {name}: {where} has no {attribute}; its engines: {there}"
            ) from None
    return defined(found, name)


def _import_module(where: str) -> ModuleType:
    if "/" in where:
        raise ConfigError(f"{where!r} is no module; of a file write {where}.py:attribute")
    with _importing_from(Path.cwd()):
        return importlib.import_module(where)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no file {path} to take the engine from")
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None, "it ends with .py"
    assert spec.loader is not None, "likewise"
    module = importlib.util.module_from_spec(spec)
    # As `import` does: dataclasses and pickles look their module up.
    sys.modules.setdefault(path.stem, module)
    with _importing_from(path.resolve().parent):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """First in the path meanwhile, as for a script; then last.

    What we import later must not find a file of the folder in place of the standard library.
    """
    name = str(folder)
    sys.path.insert(0, name)
    try:
        yield
    finally:
        sys.path.remove(name)
        if name not in sys.path:
            sys.path.append(name)
