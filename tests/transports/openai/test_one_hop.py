"""A frontend and its upstreams, without workers: who is asked, and what the client sees."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import trio

from tests.certificates import Authority
from tests.runtime.one_process import OneProcess, until_tasks
from tests.transports.openai.fake import (
    HELLO,
    STREAM_HEAD,
    Asked,
    FakeUpstream,
    Front,
    ask_until,
    chat_chunk,
    chunk,
    events,
    open_fake,
    open_front,
    open_hop,
    says,
    streams,
    until,
    whole,
)
from trinamo.runtime.config.upstream import UpstreamConfig
from trinamo.runtime.errors import ConnectError
from trinamo.runtime.process.settings import write_setting
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.openai import client
from trinamo.transports.openai.engine import open_upstream_engine


async def test_requests_take_turns_among_upstreams_that_list_the_model() -> None:
    async with open_fake() as one, open_fake() as other, open_fake() as third:
        third.models = [{"id": "another"}]
        async with open_hop(one, other, third) as front:
            await front.wait_model("another")
            await ask_until(front, lambda: one.asked and other.asked)
            assert not third.asked
            assert (await front.chat(model="another", stream=True)).content == HELLO

    assert third.asked[0].json["model"] == "another"


async def test_a_setting_changes_how_upstreams_are_tried_while_the_frontend_runs() -> None:
    transports = OneProcess()
    failing = says(whole({"error": "no"}, 500))
    async with open_fake() as one, open_fake() as other:
        urls = f"{one.url},{other.url}"
        often = {"worker__upstream__health_interval_s": "0.05", "router__inhibit_s": "0.001"}
        async with open_front(transports, http__upstreams=urls, **often) as front:
            await front.wait_model()
            await ask_until(front, lambda: one.asked and other.asked)
            one.answer = failing
            assert [(await front.chat(stream=True)).status_code for _ in range(4)] == [200] * 4
            control = MemoryControlPlane(transports.store)
            await write_setting(control, "router.attempts_max", "1")
            with trio.fail_after(120):
                while (await front.chat(stream=True)).status_code == 200:
                    pass


async def test_the_client_may_name_the_upstream() -> None:
    async with open_fake() as one, open_fake() as other, open_hop(one, other) as front:
        await ask_until(front, lambda: one.asked and other.asked)
        name = (await front.chat(stream=True)).headers["x-trinamo-worker"]
        before = len(one.asked), len(other.asked)
        for _ in range(4):
            body = {"model": "m", "messages": [], "stream": True}
            headers = {"x-trinamo-worker": name}
            await front.client.post("/v1/chat/completions", json=body, headers=headers)
        counts = len(one.asked) - before[0], len(other.asked) - before[1]

    assert sorted(counts) == [0, 4]


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_failure_is_asked_of_another_upstream(status: int) -> None:
    async with open_fake() as one, open_fake() as other, open_hop(one, other) as front:
        await ask_until(front, lambda: one.asked and other.asked)
        one.answer = says(whole({"error": "no"}, status))
        before = len(one.asked)
        await ask_until(front, lambda: len(one.asked) > before)


async def test_a_whole_answer_that_breaks_off_is_asked_of_another_upstream() -> None:
    """Nothing of it has reached the client."""
    body = {"model": "m", "choices": [{"index": 0, "message": {}, "finish_reason": "stop"}]}
    sent = whole(body)

    async def break_off(_: Asked, stream: trio.SocketStream) -> None:
        await stream.send_all(sent[:-9])
        await stream.aclose()

    async with open_fake() as one, open_fake() as other, open_hop(one, other) as front:
        one.answer, other.answer = break_off, says(sent)
        with trio.fail_after(120):
            while not one.asked:
                answer = await front.chat()
                assert (answer.status_code, answer.json()) == (200, body)
        assert other.asked


@pytest.mark.check
@pytest.mark.parametrize("begun", [b"", STREAM_HEAD], ids=["no head", "no event"])
async def test_a_request_over_which_two_upstreams_fell_silent_is_given_to_no_third(
    begun: bytes,
) -> None:
    """As of workers: it may be what blocks them."""

    async def stall(_: Asked, stream: trio.SocketStream) -> None:
        await stream.send_all(begun)
        await trio.sleep_forever()

    limits = {f"worker__upstream__{name}_timeout_s": "3" for name in ("stall", "first_byte")}
    fakes = [open_fake(stall) for _ in range(4)]
    async with fakes[0] as one, fakes[1] as two, fakes[2] as three, fakes[3] as four:
        upstreams = (one, two, three, four)
        async with open_hop(*upstreams, router__attempts_max="4", **limits) as front:
            with trio.fail_after(120):
                answer = await front.chat(stream=True)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "silent")
    assert sum(len(each.asked) for each in upstreams) == 2


async def test_a_prompt_that_nobody_can_answer_has_nobody_passed_over() -> None:
    """Its errors are in a row only with others of the same server."""

    async def answer(asked: Asked, stream: trio.SocketStream) -> None:
        failed = asked.json["messages"][0]["content"] == "poison"
        await (says(whole({"error": "no"}, 500)) if failed else streams(HELLO))(asked, stream)

    poison = {"messages": [{"role": "user", "content": "poison"}]}
    async with open_fake(answer) as one, open_fake(answer) as other, open_hop(one, other) as front:
        for _ in range(4):
            assert (await front.chat(**poison)).status_code == 502
            found = (await front.client.get("/status")).json()["cluster"]["instances"]
            assert [each["state"] for each in found] == ["live", "live"]
            one.asked.clear()
            other.asked.clear()
            await ask_until(front, lambda: one.asked and other.asked)


async def test_if_all_are_full_the_client_is_told_when_to_come_again() -> None:
    async with open_fake() as one, open_fake() as other, open_hop(one, other) as front:
        one.answer = other.answer = says(whole({"error": "no"}, 429, retry_after="9"))
        answer = await front.chat(stream=True)

    assert (answer.status_code, answer.headers["retry-after"]) == (429, "9")
    assert len(one.asked) == len(other.asked) == 1


async def test_equal_beginnings_go_to_one_upstream() -> None:
    """Cache-aware routing: pieces of the text stand for blocks."""
    prompts = [f"{name} " * 200 for name in ("alpha", "beta", "gamma", "delta")]
    async with (
        open_fake() as one,
        open_fake() as other,
        open_hop(one, other, router__policy="kv") as front,
    ):
        for turn in range(4):
            for prompt in prompts:
                said = [{"role": "user", "content": f"{prompt} turn {turn}"}]
                await front.chat(messages=said, stream=True)

    homes = [{each.json["messages"][0]["content"][:5] for each in up.asked} for up in (one, other)]
    assert homes[0] | homes[1] == {prompt[:5] for prompt in prompts}
    assert not homes[0] & homes[1]


async def test_the_load_that_an_upstream_tells_counts() -> None:
    """Whoever causes it: a frontend that has sent nothing yet goes where less is to do."""
    async with open_fake() as busy, open_fake() as idle:
        busy.metrics = b"vllm:num_requests_running 40\nvllm:num_requests_waiting 3\n"
        idle.metrics = b"vllm:num_requests_running 0\n"
        async with open_hop(busy, idle, router__policy="power_of_two") as front:
            with trio.fail_after(120):
                while True:
                    before = len(busy.asked)
                    for _ in range(6):
                        await front.chat(stream=True)
                    if len(busy.asked) == before:
                        break

    assert idle.asked


async def test_upstreams_come_and_go_with_their_health() -> None:
    async with open_fake() as fake, open_hop(fake) as front:
        fake.health = 503
        with trio.fail_after(120):
            while (await front.client.get("/health")).json()["status"] != "waiting":
                await trio.sleep(0.02)
        fake.health = 200
        await front.wait_model()
        assert (await front.chat(stream=True)).content == HELLO


HANGING = """
import trio
from tests.transports.openai.fake import STREAM_HEAD, chat_chunk, chunk, events, open_fake

async def hang(_, stream):
    await stream.send_all(STREAM_HEAD + chunk(events(chat_chunk("Hel"), done=False)))
    await trio.sleep_forever()

async def main():
    async with open_fake(hang) as fake:
        print(fake.port, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.fixture
def dying() -> Iterator[subprocess.Popen[str]]:
    """An upstream in a process of its own, which tells its port and then never ends an answer."""
    command = [sys.executable, "-c", HANGING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


async def test_an_upstream_that_is_killed_in_the_middle_ends_its_answer_and_is_passed_over(
    dying: subprocess.Popen[str],
) -> None:
    """`kill -9`: the stream ends with a typed error; the next ones are whole."""
    assert dying.stdout is not None
    port = int(await trio.to_thread.run_sync(dying.stdout.readline))
    async with open_fake() as other:
        other.health = 503
        async with open_hop(FakeUpstream(port=port), other) as front:
            body = {"model": "m", "messages": [], "stream": True}
            found = ""
            async with front.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for piece in answer.aiter_text():
                    if not found:
                        dying.kill()
                    found += piece
            assert "Hel" in found
            assert json.loads(found.rpartition("data: ")[2])["error"]["code"] == "disconnected"
            other.health = 200
            with trio.fail_after(120):
                while (await front.chat(stream=True)).content != HELLO:
                    await trio.sleep(0.02)
            for _ in range(4):
                assert (await front.chat(stream=True)).content == HELLO


async def test_an_upstream_over_tls_is_verified(tmp_path: Path) -> None:
    """One that our authority signs is asked; the certificate of another is a reason not to."""
    authority = Authority.make(tmp_path)
    certificate, key = authority.sign("upstream")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    trusts = {"worker__upstream__ca_file": str(authority.ca_file)}
    async with open_fake(tls=tls) as fake:
        async with open_hop(fake, **trusts) as front:
            for _ in range(3):
                assert (await front.chat(stream=True)).content == HELLO
        section = UpstreamConfig(url=fake.url, start_timeout_s=0.5)
        with pytest.raises(ConnectError, match="certificate"):
            async with open_upstream_engine(section):
                pass


async def test_nothing_is_left_behind() -> None:
    async def die(_: Asked, stream: trio.SocketStream) -> None:
        await stream.send_all(STREAM_HEAD + chunk(events(chat_chunk("a"), done=False)))
        await stream.aclose()

    async with open_fake() as fake:
        before = trio.lowlevel.current_statistics().tasks_living
        async with open_hop(fake) as front:
            for _ in range(3):
                await front.chat(stream=True)
            fake.answer = die
            await front.chat(stream=True)
        await until(lambda: fake.open_count == 0)
        await until_tasks(before)


# The openai and httpx packages leave generators to the garbage collector, which trio reports.
@pytest.mark.filterwarnings("ignore:Async generator '(openai|httpx|httpcore):ResourceWarning")
async def test_the_official_client_reads_what_passes() -> None:
    tool = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = events(
        chat_chunk(choices=[{"index": 0, "delta": {"reasoning_content": "Hm"}}]),
        chat_chunk(choices=[{"index": 0, "delta": {"tool_calls": [tool]}}]),
        chat_chunk(finish="tool_calls"),
        chat_chunk(
            choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        ),
    )
    async with (
        open_fake(says(STREAM_HEAD + chunk(said) + b"0\r\n\r\n")) as fake,
        open_hop(fake) as front,
        openai.AsyncOpenAI(api_key="k", base_url=f"{front.url}/v1", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
            extra_body={"top_k": 3},
            stream=True,
        )
        chunks = [each async for each in stream]
        fake.answer = says(
            whole({"object": "list", "model": "m", "data": [{"embedding": [0.5], "index": 0}]})
        )
        vectors = await client.embeddings.create(model="m", input="a", encoding_format="float")

    calls = [call for each in chunks for c in each.choices for call in c.delta.tool_calls or ()]
    assert calls[0].function is not None
    assert calls[0].function.name == "f"
    assert chunks[0].choices[0].delta.model_extra == {"reasoning_content": "Hm"}
    assert chunks[-1].usage is not None
    assert vectors.data[0].embedding == [0.5]
    assert fake.asked[0].json["top_k"] == 3
    assert "temperature" not in fake.asked[0].json


async def test_no_port_is_opened_for_workers_that_nobody_asks() -> None:
    transports = OneProcess()
    async with open_fake() as fake, open_front(transports, http__upstreams=fake.url) as front:
        await front.wait_model()
        assert (await front.chat(stream=True)).content == HELLO

    assert [*transports.homes, *transports.dialers, *transports.request_planes] == []


async def test_the_models_list_tells_the_least_context_of_those_that_are_asked() -> None:
    """Servers of one model may differ in it: each is asked all the same."""

    async def context(front: Front) -> Any:
        return (await front.client.get("/v1/models/m")).json().get("max_model_len")

    async with open_fake() as one, open_fake() as other:
        other.models = [{"id": "m", "max_model_len": 2048}]
        async with open_hop(one, other) as front:
            await ask_until(front, lambda: one.asked and other.asked)
            assert await context(front) == 2048
            other.models = [{"id": "m"}]
            with trio.fail_after(120):
                while await context(front) != 4096:
                    await trio.sleep(0.02)
            one.models = []
            with trio.fail_after(120):
                while await context(front) is not None:
                    await trio.sleep(0.02)
            assert (await front.chat(stream=True)).content == HELLO


SPAN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("requests_max", ["0", "128"])
async def test_a_client_s_traceparent_reaches_the_upstream(requests_max: str) -> None:
    """As it came, where the frontend adds no span of its own; what is none is left out."""
    async with (
        open_fake() as fake,
        open_hop(fake, traces__requests_max=requests_max) as front,
    ):
        for said in (SPAN, "nonsense"):
            front.client.headers["traceparent"] = said
            assert (await front.chat(stream=True)).content == HELLO

    assert [each.headers.get("traceparent") for each in fake.asked] == [SPAN, None]


async def test_with_tracing_the_upstream_s_span_is_a_child_of_ours() -> None:
    async with open_fake() as fake, open_hop(fake, tracing__enabled="true") as front:
        front.client.headers["traceparent"] = SPAN
        assert (await front.chat(stream=True)).content == HELLO

    told = fake.asked[0].headers["traceparent"]
    assert told[:36] == SPAN[:36]
    assert told != SPAN


async def test_what_a_burst_has_opened_is_closed_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not requests still come, each of which uses the connection that was used last."""
    monkeypatch.setattr(client, "_IDLE_S", 0.2)
    go = trio.Event()

    async def wait(_: Asked, stream: trio.SocketStream) -> None:
        await go.wait()
        await stream.send_all(STREAM_HEAD + chunk(HELLO) + b"0\r\n\r\n")

    async with open_fake(wait) as fake, open_hop(fake) as front:
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(partial(front.chat, stream=True))
            await until(lambda: len(fake.asked) == 8)
            assert fake.open_count >= 8
            go.set()
        await until(lambda: fake.open_count <= 1)
