"""The page of all that `import trinamo` offers: the sections of its stub, and what each name says."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import trinamo
from trinamo.runtime import planes

_STUB: Final = Path(trinamo.__file__).with_suffix(".pyi")

_INTRO: Final = """\
# What programs import

<!-- Written by `make docs` from `src/trinamo/__init__.pyi` and the docstrings; edit those. -->

All that `import trinamo` offers, made from the code.

All that is public is `trinamo.<name>`.
Deeper modules may change between releases; what is here changes with an entry in the changelog.
A name is imported when it is first used, so that `import trinamo` loads nothing else.
How a call behaves, and what it raises, is in its docstring: `help(trinamo.open_runtime)`.

* A worker is one async generator: `examples/hello.py` has it and its caller in one process.
  `trinamo.serve_stream` keeps one up until SIGINT or SIGTERM, and then lets requests in flight end.
  A handler whose items are made elsewhere than in its task, such as in a loop for all requests, hands
  them to a `Sink` instead: `Runtime.serve_push`.
* An engine of your own is an async generator under `trinamo.engine`: `examples/own_engine.py`.
  `trinamo.run` serves it over HTTP in one process, `trinamo worker --engine file.py:name` in a
  cluster.
  What needs more than a generator is a class with `info`, `generate` and `statistics`
  (`GenerationEngine`), and with `forward` if it pushes (`ForwardsDeltas`); `trinamo.serve_worker`
  registers it under its model's name.
  For a model that computes step by step, `open_engine_host` has the batching loop: see `StepEngine`.
* The HTTP service is an object, too, whose models are added and removed by hand: `examples/http_service.py`.
* A program that only calls opens `trinamo.connect`: models, answers, clients of endpoints.
* A transport of your own implements the interfaces of `trinamo.planes`, which [is a module of its
  own](write_a_transport.md), and is held to them by `trinamo.conformance`.
* Errors are one tree, told in [errors.md](errors.md); the keys of `Config` are in
  [configuration.md](configuration.md).
"""


def public_names() -> dict[str, list[str]]:
    """The names of each section of the stub, in its order."""
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in _STUB.read_text("utf-8").splitlines():
        if line.startswith("# "):
            names = found.setdefault(line.removeprefix("# ").rstrip("."), [])
        else:
            names += re.findall(r"(\w+) as \1\b", line)
    return {title: names for title, names in found.items() if names}


def api_page() -> str:
    """The Markdown of `docs/api.md`."""
    parts = [_INTRO]
    parts += [_table(title, names, trinamo) for title, names in public_names().items()]
    title = "What a transport implements: `trinamo.planes`"
    return "\n".join([*parts, _table(title, sorted(planes.__all__, key=str.lower), planes)])


def _table(title: str, names: Iterable[str], home: object) -> str:
    rows = "".join(f"| `{name}` | {_summary(getattr(home, name))} |\n" for name in names)
    return f"## {title}\n\n| name | |\n|---|---|\n{rows}"


def _summary(value: Any) -> str:
    """The first sentence of its docstring; of an error all of the first paragraph."""
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    is_error = isinstance(value, type) and issubclass(value, Exception)
    return text if is_error else re.split(r"(?<=\.)\s", text)[0]
