"""How a mistake is entered by name, put into the code for one run, and taken out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

Patch = tuple[Any, str, Any]
"""An owner, the name of one of its attributes, and what stands there while the bug is planted."""
BUGS: dict[str, Callable[[], list[Patch]]] = {}
"""By name; each says what to replace, when it is planted."""


def bug(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Enter a mistake in `BUGS` under the function's name."""
    assert make.__name__ not in BUGS, f"two mistakes are called {make.__name__}"
    BUGS[make.__name__] = make
    return make


def stands(name: str, *patches: Patch) -> None:
    """Enter a mistake called `name` in which these stand for what is there; the comment says which it is."""
    assert name not in BUGS, f"two mistakes are called {name}"
    made = list(patches)
    BUGS[name] = lambda: made


NOTHING: Callable[..., Any] = lambda *_, **__: None  # noqa: E731 -- what is left out
"""What stands for a step that is left out."""


def instead_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the function below as a mistake that stands in for `owner.name`.

    It is called with what it replaces, and then with the arguments of the call.
    """

    def enter(mistake: Callable[..., Any]) -> Callable[..., Any]:
        def make() -> list[Patch]:
            replaced = getattr(owner, name)

            @wraps(replaced)
            def stand_in(*args: Any, **options: Any) -> Any:
                return mistake(replaced, *args, **options)

            return [(owner, name, stand_in)]

        make.__name__ = mistake.__name__
        bug(make)
        return mistake

    return enter


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The mistake `name` is in the code while inside; nothing of it remains afterwards."""
    with ExitStack() as stack:
        for owner, attribute, stand_in in BUGS[name]():
            stack.enter_context(patch.object(owner, attribute, stand_in))
        yield
