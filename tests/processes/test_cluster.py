"""A cluster as a new user starts it, with `trinamo up`: answers, deaths, a drain, outages and its end.

Each test leaves the shared cluster whole. What needs a cluster of its own, longer or rarer faults is
in `tests/cluster`, `tests/outages` and `tests/cli`, for `make check`.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from itertools import chain
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import needs
from tests.cli.places import Place, RunningCluster, cluster, is_running, wait_for
from trinamo.runtime.engines.llamacpp.model_file import missing_model

PATIENCE_S = 120.0
"""A safety net for one answer on a busy machine."""
LONG = {
    "messages": [{"role": "user", "content": "a long story"}],
    "max_tokens": 400,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Two workers with the engine `exact`, whose tokens are the same in every process."""
    place = Place(tmp_path_factory.mktemp("up"))
    # `up` would end a worker that is frozen for longer than the time given here.
    patient = ("--set", "worker.hang_timeout_s=600")
    with cluster(place, "--engine", "exact", "--workers", "2", *patient) as running:
        yield running


@contextmanager
def answer(running: RunningCluster, body: dict[str, Any]) -> Iterator[HTTPResponse]:
    request = urllib.request.Request(
        f"{running.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        yield response


def whole(running: RunningCluster, body: dict[str, Any]) -> dict[str, Any]:
    with answer(running, body) as response:
        found: dict[str, Any] = json.load(response)
    return found


def text_of(found: dict[str, Any]) -> str:
    return str(found["choices"][0]["message"]["content"])


@contextmanager
def stream(running: RunningCluster, body: dict[str, Any]) -> Iterator[tuple[HTTPResponse, Any]]:
    """The response and its events, once the first piece of text has come."""
    with answer(running, {**body, "stream": True}) as response:
        lines = (line.decode().removeprefix("data: ").strip() for line in response)
        events = (line for line in lines if line)
        yield response, chain([next(events)], events)


def streamed_text(events: Iterator[str]) -> str:
    """The text of all events to the last; the last is `[DONE]`, or the answer is not whole."""
    *pieces, last = events
    assert last == "[DONE]", last
    choices = [json.loads(piece)["choices"] for piece in pieces]
    return "".join(each[0]["delta"].get("content") or "" for each in choices if each)


def instances(running: RunningCluster) -> list[dict[str, Any]]:
    """The instances in `trinamo status`; none where it found neither etcd nor a frontend."""
    told = running.place.run("status", "--json", "--timeout", "60").stdout
    found: list[dict[str, Any]] = json.loads(told)["instances"] if told else []
    return found


def pid_of(running: RunningCluster, instance_id: str) -> int:
    found: dict[str, int] = {}

    def is_found() -> bool:
        found.update({each["id"]: int(each["metadata"]["pid"]) for each in instances(running)})
        return instance_id in found

    wait_for(is_found, PATIENCE_S, f"an instance {instance_id} in the status")
    return found[instance_id]


def child(running: RunningCluster, word: str) -> int:
    return next(pid for pid, line in running.children.items() if word in line)


def is_at_rest(running: RunningCluster) -> bool:
    """Both workers are registered and ready, and neither works on a request."""
    found = [each["health"] or {} for each in instances(running)]
    return [
        (each.get("status"), each.get("active"), each["engines"]["exact"]["running"])
        for each in found
        if each.get("engines")
    ] == [("ready", 0, 0)] * 2


def test_a_chat_is_answered(exact: RunningCluster) -> None:
    found = whole(exact, {**LONG, "max_tokens": 8})

    assert found["usage"]["completion_tokens"] == 8
    assert found["choices"][0]["finish_reason"] == "length"
    assert text_of(found)


def test_openai_s_client_gets_answers_whole_and_streamed(exact: RunningCluster) -> None:
    with openai.OpenAI(base_url=f"{exact.url}/v1", api_key="none", max_retries=0) as client:
        models = [model.id for model in client.models.list()]
        request: Any = {**LONG, "model": "exact", "max_tokens": 12}
        one = client.chat.completions.create(**request)
        options = {"include_usage": True}
        request = {**request, "stream": True, "stream_options": options}
        chunks: list[Any] = [*client.chat.completions.create(**request)]
        completion = client.completions.create(model="exact", prompt="once upon", max_tokens=8)

    assert models == ["exact"]
    streamed = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert streamed == one.choices[0].message.content
    assert one.choices[0].finish_reason == "length"
    assert one.usage.completion_tokens == chunks[-1].usage.completion_tokens == 12
    assert completion.choices[0].text


def test_a_client_that_leaves_frees_its_worker(exact: RunningCluster) -> None:
    with stream(exact, {**LONG, "max_tokens": 100_000}) as (response, _):
        response.close()

    wait_for(lambda: is_at_rest(exact), PATIENCE_S, "the end of the request")


def test_an_answer_goes_on_when_its_worker_is_killed(exact: RunningCluster) -> None:
    undisturbed = text_of(whole(exact, LONG))
    with stream(exact, LONG) as (response, events):
        os.kill(pid_of(exact, response.headers["x-trinamo-worker"]), signal.SIGKILL)
        assert streamed_text(events) == undisturbed

    wait_for(lambda: is_at_rest(exact), PATIENCE_S, "the worker's return")


@pytest.mark.check
def test_a_frozen_worker_is_named_as_gone_until_it_is_back(exact: RunningCluster) -> None:
    """Its lease runs out, and discovery does not name it any more; `status` does, and exits with 3."""
    with stream(exact, LONG) as (response, events):
        worker = pid_of(exact, response.headers["x-trinamo-worker"])
        assert streamed_text(events)

    def code_and_gone() -> tuple[int, list[str]]:
        # Not longer: while discovery still names the frozen worker, this waits for its answer.
        ran = exact.place.run("status", "--json", "--timeout", "6")
        away = json.loads(ran.stdout)["away"] if ran.stdout else []
        return ran.returncode, [each for each in away if each.startswith("gone: ")]

    def is_gone() -> bool:
        code, gone = code_and_gone()
        return code == 3 and bool(gone)

    os.kill(worker, signal.SIGSTOP)
    try:
        wait_for(is_gone, PATIENCE_S, "the loss of a worker")
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_for(
        lambda: is_at_rest(exact) and code_and_gone() == (0, []),
        PATIENCE_S,
        "the worker's return",
    )


def test_a_worker_that_drains_finishes_its_answer(exact: RunningCluster) -> None:
    undisturbed = text_of(whole(exact, LONG))
    with stream(exact, LONG) as (response, events):
        worker = pid_of(exact, response.headers["x-trinamo-worker"])
        os.kill(worker, signal.SIGTERM)
        assert streamed_text(events) == undisturbed

    wait_for(lambda: not is_running(worker), PATIENCE_S, "the worker's end")
    wait_for(lambda: is_at_rest(exact), PATIENCE_S, "the return of a worker")


def test_a_frontend_that_is_killed_frees_the_workers_and_comes_back(exact: RunningCluster) -> None:
    def is_cut() -> bool:
        """Kill the frontend in an answer; False if all of the answer had been sent by then."""
        word = "frontend is back"
        returns = exact.place.output.count(word)
        frontend = child(exact, " frontend ")
        with stream(exact, {**LONG, "max_tokens": 100_000}) as (_, events):
            os.kill(frontend, signal.SIGKILL)
            try:
                is_whole = "[DONE]" in [*events]
            except (OSError, HTTPException):
                is_whole = False
        wait_for(lambda: exact.place.output.count(word) > returns, PATIENCE_S, "its return")
        return not is_whole

    wait_for(is_cut, PATIENCE_S, "a cut in an answer")
    wait_for(lambda: is_at_rest(exact), PATIENCE_S, "the end of the request")
    assert text_of(whole(exact, {**LONG, "max_tokens": 8}))


@pytest.mark.parametrize("server", ["etcd", "nats-server"])
def test_an_outage_of_a_server_stops_no_request(exact: RunningCluster, server: str) -> None:
    undisturbed = text_of(whole(exact, LONG))
    pid = child(exact, server)
    os.kill(pid, signal.SIGSTOP)
    frozen = text_of(whole(exact, LONG))
    os.kill(pid, signal.SIGKILL)
    dead = text_of(whole(exact, LONG))

    assert (frozen, dead) == (undisturbed, undisturbed)
    wait_for(lambda: is_at_rest(exact), PATIENCE_S, f"the return of {server}")


def test_ctrl_c_drains_and_leaves_nothing_behind(exact: RunningCluster) -> None:
    """The last test of this cluster."""
    children, url = exact.children, exact.url
    with stream(exact, LONG) as (_, events):
        exact.process.send_signal(signal.SIGINT)
        assert streamed_text(events)

    assert exact.process.wait(PATIENCE_S) == 0, exact.place.output
    assert len(children) == 5
    assert not [pid for pid in children if is_running(pid)]
    assert exact.place.leftovers == []
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=PATIENCE_S)


def test_long_prompts_are_computed_by_a_prefill_worker(tmp_path: Path) -> None:
    settings = {
        "disaggregation.prefill_tokens_local_max": 64,
        # After these the decode worker computes the prompt by itself.
        "disaggregation.queue_timeout_s": 60,
        "data_plane.transfer.probe_timeout_s": 60,
    }
    prompt = {"messages": [{"role": "user", "content": "a long story " * 20}], "max_tokens": 8}
    options = ["--engine", "exact", "--disagg", "--prefill", "1", "--decode", "1"]
    options += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with cluster(Place(tmp_path), *options) as running:

        def look(role: str) -> dict[str, Any]:
            """What the worker of this role reports of disaggregation."""
            health = [
                each["health"] or {}
                for each in instances(running)
                if each["metadata"]["role"] == role
            ]
            return dict(health[0].get("disaggregation", {})) if health else {}

        wait_for(
            lambda: bool(look("decode").get("prefill_workers")),
            PATIENCE_S,
            "the decode worker's discovery of the prefill worker",
        )
        assert whole(running, prompt)["usage"]["completion_tokens"] == 8
        wait_for(lambda: bool(look("prefill").get("jobs")), PATIENCE_S, "the count of the job")
        decode, prefill = look("decode"), look("prefill")

    assert decode["prefills"] == {"long_prompt": 1}
    assert prefill["jobs"] == {"done": 1}


@needs.A_MODEL.unless(missing_model() is None)
def test_the_shipped_model_answers(tmp_path: Path) -> None:
    """What `make up` starts."""
    with cluster(Place(tmp_path), "--workers", "1") as running:
        body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16}
        found = whole(running, body)

    assert found["usage"]["completion_tokens"] > 1
    assert text_of(found)
