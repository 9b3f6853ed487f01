"""The page of what became of each program: docs/clients.md, written by `pytest tests/clients --all`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tests.clients.programs import Outcome, Place, Program
from tests.sources import ROOT

PAGE: Final = ROOT / "docs" / "clients.md"
HEAD: Final = """# Programs that were tried

What people point at an OpenAI-compatible server, unpatched, and what became of it.

<!-- Written by `pytest tests/clients --all`; edit tests/clients/page.py. -->

Each program runs in an environment of its own against `trinamo up` with two workers and the shipped model,
SmolLM2-135M-Instruct, by llama.cpp. What is tried is what its user needs, not what so small a model knows.
`make check` tries the first of them, up to outlines, `pytest tests/clients --all` all of them;
each script is in `tests/clients/scripts/`.

| program | version | what was tried | result |
|---|---|---|---|
"""


HEAD_ELSEWHERE: Final = """## Tried by other tests

| program | what is tried | test |
|---|---|---|
"""
HEAD_NOT_TRIED: Final = """## Not tried

| program | why |
|---|---|
"""
ELSEWHERE: Final = (
    (
        "nginx, HAProxy, Caddy",
        "events one by one; a client that leaves",
        "shipped/test_proxies_page.py",
    ),
    ("promtool", "the alerts; every expression of the dashboard", "shipped/test_monitoring.py"),
    ("kubernetes-validate", "every manifest of `deploy/`, strictly", "shipped/test_deploy.py"),
    (
        "a collector of OTLP",
        "one trace from the client's `traceparent` on",
        "cluster/test_spans.py",
    ),
    ("llama.cpp's server, as an upstream", "what its page says", "shipped/test_upstreams_page.py"),
)
NOT_TRIED: Final = (
    ("vllm bench serve", "it comes with all of vLLM, which wants a GPU"),
    ("genai-perf", "aiperf took its place"),
    ("llmperf", "the package of that name is not the program"),
    ("Open WebUI", "several gigabytes of packages"),
    ("k6, aichat, mods", "they are on no index of Python, JavaScript or Debian"),
    ("LangGraph, CrewAI", "they ask by LangChain and LiteLLM"),
)


def write_page(outcomes: Mapping[Program, Sequence[Outcome]], lacking: Mapping[Place, str]) -> None:
    """Write it anew; nothing of an environment that is `lacking` was tried, for its reason."""
    rows = [row(program, found) for program, found in outcomes.items()]
    elsewhere = [f"| {name} | {what} | `tests/{test}` |\n" for name, what, test in ELSEWHERE]
    not_tried = [f"| {name} | {reason} |\n" for name, reason in NOT_TRIED]
    not_tried += [f"| what needs {place.name} | {why} |\n" for place, why in lacking.items()]
    PAGE.write_text(
        f"{HEAD}{''.join(rows)}\n{HEAD_ELSEWHERE}{''.join(elsewhere)}\n"
        f"{HEAD_NOT_TRIED}{''.join(not_tried)}",
        "utf-8",
    )


def row(program: Program, outcomes: Sequence[Outcome]) -> str:
    failed = [each for each in outcomes if each.failed]
    tried = "; ".join(each.tried for each in outcomes)
    result = f"{len(outcomes) - len(failed)} of {len(outcomes)}"
    if failed:
        result += f"; not {'; '.join(each.tried for each in failed)}"
    cells = (program.name, program.version, tried, result)
    return f"| {' | '.join(each.replace('|', '/') for each in cells)} |\n"
