"""The list of all pages: what each calls itself, and the sentence that it begins with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_DOCS: Final = Path(__file__).parents[1]
_GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "Read these three first": ("walkthrough", "write_a_worker", "operations"),
    "Use it": (
        "write_a_client",
        "write_a_transport",
        "http_api",
        "fields",
        "upstreams",
        "proxies",
        "clients",
        "dashboard",
        "tracing",
        "queues",
        "rollouts",
        "upgrades",
        "security",
        "configuration",
        "api",
        "errors",
    ),
    "How it works": (
        "architecture",
        "kv_routing",
        "events",
        "disaggregation",
        "migration",
        "transfer",
        "transfer_backends",
        "weights",
        "protocols/request_stream",
        "protocols/response_stream",
        "protocols/presence",
        "protocols/membership",
        "glossary",
    ),
    "The simulator": (
        "simulate_your_own_protocol",
        "testing_with_the_simulator",
        "simulator",
        "simulation",
        "simulation_cli",
        "beside_other_simulators",
    ),
}
"""In the order in which they are read. What stands in none comes last, under `More`."""
_INTRO: Final = """\
# trinamo

<!-- Written by `make docs` from the title and the first sentence of each page; edit those. -->
"""


def index_page() -> str:
    """The Markdown of `docs/index.md`."""
    listed = {name for names in _GROUPS.values() for name in names}
    there = {path.relative_to(_DOCS).with_suffix("").as_posix() for path in _DOCS.rglob("*.md")}
    decisions = sorted(name for name in there if name.startswith("decisions/"))
    more = sorted(there - listed - set(decisions) - {"index"})
    parts = [_INTRO]
    for title, names in {**_GROUPS, "More": more}.items():
        if names:
            parts.append(f"## {title}\n\n" + "".join(map(_row, names)))
    parts.append("## Decisions\n\n" + "".join(f"* [{_title(n)}]({n}.md)\n" for n in decisions))
    return "\n".join(parts)


def _row(name: str) -> str:
    return f"* [{_title(name)}]({name}.md): {_first_sentence(name)}\n"


def _title(name: str) -> str:
    return _paragraphs(name)[0].removeprefix("# ")


def _first_sentence(name: str) -> str:
    """Without its links, which lead from where the page is."""
    text = " ".join(_paragraphs(name)[1].split())
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", re.split(r"(?<=[.!?])\s", text)[0])


def _paragraphs(name: str) -> list[str]:
    text = _DOCS.joinpath(f"{name}.md").read_text("utf-8")
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return [each.strip() for each in text.split("\n\n") if each.strip()]
