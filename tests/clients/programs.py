"""The programs that are tried, and a run of one: a table, and one process each.

`python -m tests.clients.programs` installs what the short list of them needs, with `--all` the long
one, where it is not there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from tests.clients.environments import Environment, InstallError, environ
from trinamo.runtime.engines.llamacpp.model_file import MODEL_NAME, find_model

RUN_TIMEOUT_S: Final = 300.0


@attrs.frozen
class Outcome:
    """What became of one thing that was tried; `failed` is empty if it went well."""

    tried: str
    failed: str
    took_s: float


@attrs.frozen
class Program:
    """Something that people point at a server."""

    name: str
    package: str
    environment: Environment
    script: str
    is_short: bool = True
    """Whether it is tried with every change; the others by `make clients ARGS=--all`."""

    @property
    def version(self) -> str:
        return self.environment.version(self.package)

    def run(self, url: str, place: Path) -> list[Outcome]:
        """Try it against a server; `place` is a folder of its own."""
        place.mkdir()
        told = {
            "CLIENTS_SERVER": url,
            "CLIENTS_MODEL": MODEL_NAME,
            "CLIENTS_GGUF": str(find_model()),
        }
        done = subprocess.run(
            self.environment.command(self.script, place),
            env=environ(place, told),
            cwd=place,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
        lines: list[dict[str, Any]] = [
            json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"tried"')
        ]
        found = [Outcome(each["tried"], each.get("failed", ""), each["took_s"]) for each in lines]
        if done.returncode:
            found.append(Outcome("its script runs to its end", done.stderr[-1000:], 0.0))
        return found


LIBRARIES, INSTRUCTOR, LITELLM, EVALUATIONS, JAVASCRIPT = map(
    Environment, ("libraries", "instructor", "litellm", "evaluations", "javascript")
)
PROGRAMS: Final = (
    # The longest first, as two are tried at once.
    Program("lm-eval", "lm_eval", EVALUATIONS, "lm_eval_.py"),
    Program("aiperf", "aiperf", EVALUATIONS, "aiperf_.py"),
    Program("LiteLLM's proxy", "litellm", LITELLM, "litellm_proxy.py"),
    Program("LiteLLM", "litellm", LITELLM, "litellm_.py"),
    Program("OpenAI's SDK for Python", "openai", LIBRARIES, "openai_python.py"),
    Program("OpenAI's SDK for JavaScript", "openai", JAVASCRIPT, "openai_npm.mjs"),
    Program("Vercel's AI SDK", "ai", JAVASCRIPT, "ai_sdk.mjs"),
    Program("Anthropic's SDK for Python", "anthropic", LIBRARIES, "anthropic_.py"),
    Program("LangChain", "langchain-openai", LIBRARIES, "langchain_openai_.py"),
    Program("pydantic-ai", "pydantic-ai-slim", LIBRARIES, "pydantic_ai_.py"),
    Program("OpenAI's Agents SDK", "openai-agents", LIBRARIES, "openai_agents.py"),
    Program("instructor", "instructor", INSTRUCTOR, "instructor_.py"),
    Program("outlines", "outlines", LIBRARIES, "outlines_.py"),
)


def chosen(*, is_long: bool) -> list[Program]:
    """Those of the short list or of the long one."""
    return [each for each in PROGRAMS if each.is_short or is_long]


def install(programs: Sequence[Program]) -> None:
    """Make the environments of these, one after the other, and say how long that took.

    Python's index is there, or nothing could be tested; npm's may not be, which is said.
    """
    for environment in dict.fromkeys(each.environment for each in programs):
        began_at = time.perf_counter()
        try:
            environment.make()
        except InstallError as error:
            if not environment.is_javascript:
                raise
            print(f"no program of JavaScript can be tried: {error}", flush=True)
            continue
        print(f"{environment.folder} ({time.perf_counter() - began_at:.0f} s)", flush=True)


if __name__ == "__main__":
    install(chosen(is_long="--all" in sys.argv))
