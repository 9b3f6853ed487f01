"""Lists inside pages that people write: between two marks stands what the code says.

A page asks for one with `<!-- made by make docs: policies -->` and ends it with `<!-- until here -->`.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from trinamo.runtime.process.settings import SETTINGS
from trinamo.runtime.protocol.discovery.candidates import Policy

_DOCS: Final = Path(__file__).parents[1]
_LIST: Final = re.compile(
    r"(<!-- made by make docs: ([\w ]+) -->\n).*?(<!-- until here -->)", re.DOTALL
)


def pages_with_lists() -> list[str]:
    """Paths below `docs/`, in order."""
    return sorted(
        path.relative_to(_DOCS).as_posix()
        for path in _DOCS.rglob("*.md")
        if _LIST.search(path.read_text("utf-8"))
    )


def filled_page(name: str) -> str:
    """The page as it stands, with its lists made anew. `KeyError` names a list that there is not."""
    text = _DOCS.joinpath(name).read_text("utf-8")
    return _LIST.sub(lambda found: f"{found[1]}{LISTS[found[2]]()}{found[3]}", text)


def _members(kind: type[enum.Enum]) -> str:
    """A row for each member, with the docstring that stands behind it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    rows = []
    for member, after in zip(body.body, body.body[1:], strict=False):
        match member, after:
            case (
                ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                rows.append(f"* `{kind[name].value}`: {' '.join(text.split())}\n")
            case _:
                pass
    assert len(rows) == len(kind), f"a member of {kind.__name__} has no docstring"
    return "".join(rows)


def _settings() -> str:
    rows = "".join(
        f"| `{name}` | {each.about.removesuffix(' null: as each is configured.')} |\n"
        for name, each in SETTINGS.items()
    )
    return f"| setting | |\n|---|---|\n{rows}"


LISTS: Final[Mapping[str, Callable[[], str]]] = {
    "policies": lambda: _members(Policy),
    "settings": _settings,
}
