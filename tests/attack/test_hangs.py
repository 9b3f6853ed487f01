"""A child of `trinamo up` that hangs, what would hang it, and what the system's limits are for it."""

from __future__ import annotations

import json
import os
import resource
import signal
import string
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import needs
from tests.cli.places import Place, cluster, wait_for
from trinamo.runtime.engines.llamacpp.model_file import find_model
from trinamo.runtime.errors import ConfigError


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def descriptor_limits(pid: int) -> list[str]:
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return next(line for line in lines if line.startswith("Max open files")).split()[3:5]


def test_up_tells_of_a_frontend_that_hangs_and_of_its_return(
    tmp_path: Path, few_descriptors: None
) -> None:
    """Before: not a word for as long as it was stopped."""
    place = Place(tmp_path)
    with cluster(place, "--engine", "echo", "--workers", "1") as running:
        output = running.place
        for pid, line in running.children.items():
            if " frontend " in line or " worker " in line:
                soft, hard = descriptor_limits(pid)
                assert int(soft) == min(int(hard), 1 << 20)
        [frontend] = [pid for pid, line in running.children.items() if " frontend " in line]

        os.kill(frontend, signal.SIGSTOP)
        told = f"frontend (pid {frontend}) runs, but does not answer"
        wait_for(lambda: told in output.output, 300, "the word about the frontend")
        os.kill(frontend, signal.SIGCONT)
        wait_for(lambda: "frontend answers again" in output.output, 300, "its return")

        assert output.output.count(told) == 1


BLOCKING = """
import time
import trinamo

@trinamo.engine(name="blocking", context_tokens_max=64)
async def blocking(request, context):
    if request.text == "hang":
        time.sleep(1e6)
    yield "well"
"""


def ask(url: str, path: str, timeout_s: float = 300.0, **body: Any) -> httpx.Response:
    with httpx.Client(base_url=url, trust_env=False, timeout=timeout_s) as client:
        return client.post(path, json=body)


def test_up_ends_a_worker_that_hangs_and_starts_another(tmp_path: Path) -> None:
    """Before: it was told of, and its place was lost until somebody looked."""
    (tmp_path / "mine.py").write_text(BLOCKING)
    bound = "worker.hang_timeout_s=6"
    with cluster(
        Place(tmp_path), "--engine", "mine.py:blocking", "--workers", "1", "--set", bound
    ) as running:
        output = running.place
        before = set(running.children)
        with pytest.raises(httpx.TimeoutException):
            ask(running.url, "/v1/completions", 3.0, prompt="hang")
        wait_for(lambda: "ending it" in output.output, 300, "the end of the worker")
        wait_for(lambda: "worker-1 is back" in output.output, 300, "another worker")
        gone, come = before - set(running.children), set(running.children) - before
        assert (len(gone), len(come)) == (1, 1)

        def answers() -> bool:
            answer = ask(running.url, "/v1/completions", prompt="how are you")
            return answer.status_code == 200 and answer.json()["choices"][0]["text"] == "well"

        wait_for(answers, 300, "an answer of the new worker")


def patterns(count: int) -> dict[str, Any]:
    """What takes three times as long to make a grammar of with each of them: 24 some weeks."""
    each = [{"pattern": f".*{letter}.*"} for letter in string.ascii_lowercase[:count]]
    return {"type": "string", "allOf": each}


def test_a_schema_that_cannot_be_made_hangs_no_worker(tmp_path: Path) -> None:
    """Before: one chat hung all workers, one after the other, for good; now it is a 400.

    As an answer's schema, and as the parameters of a tool that must be called. Others are answered
    all the while, and both workers are the same as before.
    """
    needs.LLAMACPP.imported()
    try:
        find_model()
    except ConfigError:
        needs.A_MODEL.lacking()
    arguments = ("--engine", "llamacpp", "--workers", "2", "--set", "router.policy=round_robin")
    with cluster(Place(tmp_path), *arguments) as running:
        url, chats = running.url, "/v1/chat/completions"
        workers = {pid for pid, line in running.children.items() if " worker " in line}
        hello: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        found: list[httpx.Response] = []
        is_over = threading.Event()

        def ask_on() -> None:
            while not is_over.is_set():
                found.append(ask(url, chats, **hello))

        beside = threading.Thread(target=ask_on)
        beside.start()
        try:
            for count in (24, 23, 22):
                schema = {"name": "s", "schema": patterns(count), "strict": True}
                refused = ask(
                    url,
                    chats,
                    **hello,
                    response_format={"type": "json_schema", "json_schema": schema},
                )
                assert refused.status_code == 400, refused.text + running.place.output
                assert "takes more than 0.5 s of processor time" in refused.text
            function = {"name": "f", "parameters": patterns(24)}
            tools = [{"type": "function", "function": function}]
            refused = ask(url, chats, **hello, tools=tools, tool_choice="required")
            assert (refused.status_code, "'tools' cannot be a grammar" in refused.text) == (
                400,
                True,
            )
        finally:
            is_over.set()
            beside.join()
        assert {each.status_code for each in found} == {200}
        seen = {each.headers["x-trinamo-worker"] for each in found}
        seen |= {ask(url, chats, **hello).headers["x-trinamo-worker"] for _ in range(8)}
        now = {pid for pid, line in running.children.items() if " worker " in line}
        assert (len(seen), now) == (2, workers)
        shape = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
        schema = {"name": "s", "schema": {**shape, "additionalProperties": False}, "strict": True}
        form = {"type": "json_schema", "json_schema": schema}
        whole = ask(url, chats, **{**hello, "max_tokens": 24}, response_format=form)
        assert isinstance(json.loads(whole.json()["choices"][0]["message"]["content"])["ok"], bool)
