"""`trinamo.serve`: an engine and its HTTP in one process, asked as any frontend is."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

import trinamo
from tests.runtime.view import pages
from trinamo import (
    ConfigError,
    Context,
    FrontendReady,
    GenerateRequest,
    ModelAlreadyExistsError,
    StopRequest,
)

SCRIPT = """\
import trinamo

@trinamo.engine(name="parrot", context_tokens_max=1024)
async def parrot(request, context):
    if request.text == "raise":
        raise ValueError("a secret")
    yield request.text.upper()

trinamo.run(parrot, port=0)
"""


@trinamo.engine(name="parrot", context_tokens_max=64)
async def parrot(request: GenerateRequest, context: Context) -> AsyncGenerator[str, None]:
    if request.text == "raise":
        raise ValueError("a secret")
    for word in request.text.split():
        yield word.upper() + " "


@asynccontextmanager
async def served(engine: Any, **settings: Any) -> AsyncIterator[tuple[str, StopRequest]]:
    """The URL and what asks it to stop; it has ended in order once the body is left."""
    stop = StopRequest()
    async with trio.open_nursery() as nursery:

        async def serve(*, task_status: trio.TaskStatus[FrontendReady]) -> None:
            config = trinamo.load_config(environ={}, overrides=settings)
            ready = task_status.started
            await trinamo.serve(engine, port=0, config=config, ready=ready, stop=stop)

        with trio.fail_after(120):
            found: FrontendReady = await nursery.start(serve)
        yield found.url, stop
        stop.request()


def ask(url: str, text: str, model: str = "parrot") -> tuple[int, dict[str, Any]]:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"content-type": "application/json", "connection": "close"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


async def asked(url: str, text: str, **more: str) -> tuple[int, dict[str, Any]]:
    return await trio.to_thread.run_sync(partial(ask, url, text, **more))


async def test_an_engine_answers_without_a_cluster() -> None:
    async with served(parrot) as (url, _):
        status, answer = await asked(url, "hello there")

    assert status == 200
    assert answer["choices"][0]["message"]["content"] == "HELLO THERE "
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.filterwarnings("ignore:.*(httpx|httpcore|Response.aiter).*")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_it_has_the_dashboard_too() -> None:
    async with (
        trinamo.open_echo_engine(model="echo") as echo,
        served([parrot, echo]) as (url, _),
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=120) as client,
    ):
        assert "<h1>" in (await client.get("/dashboard")).text
        status, _answer = await asked(url, "raise")
        assert status == 500
        async with pages.page(client) as events:
            snapshot = await anext(events)
            while not snapshot["failed"]:
                snapshot = await anext(events)
    assert snapshot["away"] == []
    shown = {(each["name"], each["model"], each["state"]) for each in snapshot["instances"]}
    assert shown == {("parrot", "parrot", "ready"), ("echo", "echo", "ready")}
    assert [each["name"] for each in snapshot["models"]] == ["parrot", "echo"]
    assert [each["instances"] for each in snapshot["models"]] == [1, 1]
    (frontend,) = snapshot["frontends"]
    assert (frontend["name"], frontend["url"]) == ("this process", url)
    assert "a secret" not in json.dumps(snapshot)


async def test_its_dashboard_has_the_same_switch() -> None:
    async with served(parrot, **{"http.dashboard": False}) as (url, _):
        asking = partial(httpx.get, f"{url}/dashboard", trust_env=False, timeout=120)
        answer = await trio.to_thread.run_sync(asking)
    assert answer.status_code == 404


async def test_several_engines_are_models_side_by_side_open_ones_among_them() -> None:
    async with (
        trinamo.open_echo_engine(model="echo") as echo,
        served([parrot, echo]) as (url, _),
    ):
        answers = [await asked(url, "hello", model=model) for model in ("parrot", "echo")]

    said = [answer["choices"][0]["message"]["content"] for _, answer in answers]
    assert said == ["HELLO ", "hello"]


async def test_what_it_raises_stays_here_and_the_next_request_is_answered() -> None:
    async with served(parrot) as (url, _):
        status, answer = await asked(url, "raise")
        again, _ = await asked(url, "hello")

    assert (status, answer["error"]["code"], again) == (500, "engine", 200)
    assert "secret" not in json.dumps(answer)


async def test_a_prompt_that_does_not_fit_is_the_client_s_mistake() -> None:
    async with served(parrot) as (url, _):
        status, answer = await asked(url, "word " * 100)

    assert (status, answer["error"]["param"]) == (400, "messages")
    assert answer["error"]["code"] == "context_length_exceeded"


async def test_an_answer_in_flight_ends_before_the_process_does() -> None:
    begun, may_end = trio.Event(), trio.Event()

    @trinamo.engine(name="parrot")
    async def slow(request: GenerateRequest, context: Context) -> AsyncGenerator[str, None]:
        yield "begun "
        begun.set()
        await may_end.wait()
        yield "ended"

    answers: list[tuple[int, dict[str, Any]]] = []
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery, served(slow) as (url, stop):

            async def one() -> None:
                answers.append(await asked(url, "go"))

            nursery.start_soon(one)
            await begun.wait()
            stop.request()
            may_end.set()

    assert [answer["choices"][0]["message"]["content"] for _, answer in answers] == ["begun ended"]


async def test_an_engine_that_cannot_be_opened_is_a_sentence() -> None:
    @trinamo.engine(name="broken")
    def broken() -> AbstractAsyncContextManager[None]:
        raise OSError("no weights")

    with pytest.raises(ConfigError, match="engine broken cannot be opened: OSError: no weights"):
        await trinamo.serve(broken, port=0, stop=StopRequest())


async def test_two_engines_of_one_name_are_refused() -> None:
    with pytest.raises(ModelAlreadyExistsError, match="parrot"):
        await trinamo.serve([parrot, parrot], port=0, stop=StopRequest())


def test_a_script_of_ten_lines_serves_until_a_signal(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    assert len(SCRIPT.splitlines()) <= 10
    with subprocess.Popen(
        [sys.executable, "-W", "error", "mine.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = line.split()[-1].removesuffix("/v1")
            status, answer = ask(url, "hello")
            failed, error = ask(url, "raise")
            with urllib.request.urlopen(f"{url}/metrics", timeout=120) as page:
                metrics = page.read().decode()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()

    assert line.startswith("parrot is served: http://127.0.0.1:")
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "HELLO")
    assert process.returncode == 0
    # What the client is told of the log is there, with a time.
    assert failed == 500
    request_id = error["error"]["message"].split()[-1]
    lines = [json.loads(each) for each in errors.splitlines()]
    assert all(each["time"] for each in lines)
    (told,) = [each for each in lines if "a secret" in each["event"]]
    assert told["request_id"] == request_id
    accesses = [each for each in lines if each["logger"] == "trinamo.access"]
    assert [each["status"] for each in accesses] == [200, 500]
    assert 'trinamo_engine_prompt_tokens_total{endpoint="parrot"}' in metrics
    assert "trinamo_build_info" in metrics
