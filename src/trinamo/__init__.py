"""trinamo: trio + three planes.

A structured-concurrency runtime for distributed LLM inference. What `__init__.pyi` lists is public:
`docs/api.md` explains it, and type checkers read it there. Each name is imported when it is first
used, so that `import trinamo` costs nothing and a program pays only for what it takes.

Start reading at `trinamo.runtime` (what things are and how they behave), then `trinamo.transports`
(how they travel), then `trinamo.sim` (the same code on simulated ground).
"""

from __future__ import annotations

from importlib import import_module


def _homes() -> dict[str, str]:
    """Which module each public name is from, as the stub says: `from .home import a as a, b as b`."""
    with open(f"{__path__[0]}/__init__.pyi", encoding="utf-8") as stub:  # noqa: PTH123 -- imports little
        text = stub.read()
    homes: dict[str, str] = {}
    for statement in text.split("\nfrom ")[1:]:
        home, _, names = statement.partition(" import ")
        homes |= dict.fromkeys(names.partition("#")[0].translate(_PUNCTUATION).split(), home)
    return {name: home for name, home in homes.items() if name != "as"}


_PUNCTUATION = str.maketrans("(),", "   ")


def __getattr__(name: str) -> object:
    if name == "__all__":
        return __dir__()
    home = _homes().get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(home, __name__), name)
    except ModuleNotFoundError as error:
        from .runtime.errors import extra_wanted  # noqa: PLC0415 -- imports what it must only

        if wanted := extra_wanted(error):
            error.add_note(wanted)
        raise
    return value


def __dir__() -> list[str]:
    return sorted(_homes())
