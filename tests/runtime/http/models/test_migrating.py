"""Answers over HTTP that are cut at every token, with engines that compute: nobody can tell."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import httpx
import pytest
import trio

from tests.dialects import messages, responses
from tests.runtime.one_process import OneProcess, config, open_process, task_count, until_tasks
from tests.sse import parse_events
from trinamo.runtime.context import Context
from trinamo.runtime.engines.exact.engine import open_exact_engine
from trinamo.runtime.engines.loop.host import EngineHost
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import DisconnectedError
from trinamo.runtime.process.roles import serve_frontend
from trinamo.runtime.process.runtime import Runtime
from trinamo.runtime.process.stopping import StopRequest
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.discovery.model_cards import encode_card, model_key
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest, ModelCard
from trinamo.runtime.sinks import Sink

ENDPOINT = EndpointName("ns", "backend", "generate")


@attrs.define
class Cut:
    """Where the next stream that comes so far is cut off, once."""

    at: int = 0
    """After so many tokens of the answer; 0: nowhere."""
    count: int = 0
    """Streams that were cut."""
    prompt: str = ""
    """Of which prompt streams are cut; empty: of any."""

    def of(self, prompt: str | None) -> Cut:
        """The cut for a stream of this prompt, which goes on to its end if another prompt is named."""
        return self if self.prompt in ("", prompt) else Cut()


class Cutting(Sink[Delta]):
    """Hands on what a worker's engine makes, up to the cut."""

    def __init__(self, sink: Sink[Delta], cut: Cut, begin: int) -> None:
        super().__init__()
        self._sink, self._cut, self._count = sink, cut, begin

    def on_room(self, listener: Any) -> None:
        self._sink.on_room(listener)

    def take(self, items: list[Delta]) -> bool:
        for delta in items:
            if self._cut.at and self._count >= self._cut.at:
                self._cut.at, self._cut.count = 0, self._cut.count + 1
                raise DisconnectedError("cut off")
            self._count += len(delta.token_ids)
        return self._sink.take(items)


@attrs.define
class House:
    client: httpx.AsyncClient
    cut: Cut
    engines: list[EngineHost]
    frontend: Runtime
    workers: list[Runtime]

    async def ask(self, cut_at: int = 0, **body: Any) -> dict[str, Any]:
        self.cut.at = cut_at
        body = {"prompt": "Say anything.", "model": "exact", **body}
        response = await self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return {"choices": answer["choices"], "usage": answer["usage"]}

    async def stream(self, cut_at: int = 0, **body: Any) -> dict[str, Any]:
        """As `ask`, put together from the events."""
        self.cut.at = cut_at
        body = {"prompt": "Say anything.", "model": "exact", "stream": True, **body}
        body["stream_options"] = {"include_usage": True}
        response = await self.client.post("/v1/completions", json=body)
        *events, done = [line[6:] for line in response.text.splitlines() if line]
        assert done == "[DONE]"
        *chunks, usage = [json.loads(event) for event in events]
        choices = [chunk["choices"][0] for chunk in chunks]
        text = "".join(choice["text"] for choice in choices)
        whole = {**choices[-1], "text": text}
        return {"choices": [whole], "usage": usage["usage"]}


@asynccontextmanager
async def open_house(
    weights: Sequence[str] = ("", ""), *, can_resume: bool = True, **settings: Any
) -> AsyncIterator[House]:
    """A frontend and a worker for each of `weights`; when it is left, nobody works any more and no block is held."""
    transports, cut, tasks = OneProcess(), Cut(), task_count()
    async with AsyncExitStack() as stack:
        workers = [
            await open_worker(stack, transports, cut, fingerprint=each, can_resume=can_resume)
            for each in weights
        ]
        engines = [engine for engine, _ in workers]
        nursery = await stack.enter_async_context(trio.open_nursery())
        url: list[str] = []
        opened: list[Runtime] = []
        running = config(http__port=0, **settings)
        with trio.fail_after(120):
            nursery.start_soon(
                lambda: serve_frontend(
                    running,
                    RealEnv(),
                    transports,
                    StopRequest(),
                    ready=lambda facts: url.append(facts.url),
                    opened=lambda runtime, _: opened.append(runtime),
                )
            )
            while not url:
                await trio.sleep(0.005)
        client = httpx.AsyncClient(base_url=url[0], trust_env=False, timeout=120)
        async with client:
            yield House(client, cut, engines, opened[0], [process for _, process in workers])
        with trio.fail_after(120):
            while any(engine.statistics().blocks_used for engine in engines):
                await trio.sleep(0.002)
            while transports.open_streams:
                await trio.sleep(0.002)
        nursery.cancel_scope.cancel()
    await until_tasks(tasks)


async def open_worker(
    stack: AsyncExitStack, transports: OneProcess, cut: Cut, **told: Any
) -> tuple[EngineHost, Runtime]:
    engine = await stack.enter_async_context(open_exact_engine())
    process = await stack.enter_async_context(open_process(transports, serving=True))

    async def forward(request: GenerateRequest, context: Context, sink: Sink[Delta]) -> None:
        cutting = Cutting(sink, cut.of(request.prompt), len(request.delivered_ids))
        await engine.forward(request, context, cutting)

    await process.serve_push(ENDPOINT, forward, request_type=GenerateRequest)
    assert process.instance_id is not None
    created = len(transports.homes)
    card = ModelCard(name="exact", endpoint=str(ENDPOINT), created=created, **told)
    await process.publish(model_key("exact", process.instance_id), encode_card(card))
    return engine, process


TOKENS = 20
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": TOKENS}


@pytest.mark.check
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_an_answer_is_the_same_wherever_it_is_cut(sampling: dict[str, Any]) -> None:
    """I11: text, finish reason and usage, streamed and whole, and a stop string behind the cut."""
    async with open_house() as house:
        plain = await house.ask(**sampling)
        text = plain["choices"][0]["text"]
        # Long enough that a cut falls into it, and beginning where it first appears.
        stop = text[14:19]
        stopped = await house.ask(**sampling, stop=[stop])
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert stopped["choices"][0]["text"] == text[: text.index(stop)]
        for point in range(1, TOKENS):
            for ask in (house.ask, house.stream):
                assert await ask(point, **sampling) == plain
                before = house.cut.count
                assert await ask(point, **sampling, stop=[stop]) == stopped
                # What may begin the stop string is held back, and comes in one piece with its end.
                assert (house.cut.count > before) is (point <= text.index(stop))
        assert house.cut.count >= 2 * (TOKENS - 1)


@pytest.mark.parametrize(
    ("path", "body", "dialect"),
    [
        ("/v1/responses", {"input": "Say anything.", "max_output_tokens": TOKENS}, responses),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "Say anything."}], "max_tokens": TOKENS},
            messages,
        ),
    ],
    ids=["responses", "messages"],
)
async def test_an_answer_in_another_form_moves_like_any_other(
    path: str, body: dict[str, Any], dialect: Any
) -> None:
    """Its events are legal and add up to the same, with the ids that it began with."""
    async with open_house() as house:
        told = []
        for point in (0, 1, 9, TOKENS - 1):
            house.cut.at = point
            asked = {"model": "exact", "stream": True, "temperature": 0, **body}
            answer = await house.client.post(path, json=asked)
            events = [json.loads(event.data) for event in parse_events(answer.content)]
            dialect.check_events(events)
            whole = dialect.fold_events(events)
            number = answer.headers["x-request-id"]
            assert number in whole["id"]
            content = json.dumps(whole.get("output") or whole["content"])
            told.append((content.replace(number, ""), whole["usage"]["output_tokens"]))
        assert told == [told[0]] * len(told)
        assert house.cut.count == 3


async def test_an_answer_without_a_seed_is_drawn_on_as_it_was_begun() -> None:
    """The seed is fixed before the first stream: the tokens delivered are those drawn again."""
    async with open_house() as house:
        answer = await house.ask(9, temperature=1.5, max_tokens=16)
        assert answer["usage"]["completion_tokens"] == 16
        assert house.cut.count == 1


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_client_that_leaves_while_its_answer_moves_leaves_nothing_behind(
    is_streamed: bool,
) -> None:
    """S7: the house checks blocks, streams and tasks."""
    async with open_house() as house:
        for delay_s in (0.0, 0.002, 0.005, 0.01, 0.02):
            cuts = house.cut.count
            # The answer before may still be on its way, and is not to be cut in place of this one.
            house.cut.prompt, house.cut.at = f"go on for {delay_s}", 5
            async with trio.open_nursery() as nursery:
                body = {"prompt": house.cut.prompt, "stream": is_streamed, "max_tokens": 400}
                nursery.start_soon(read_all, house, body)
                while house.cut.count == cuts:
                    await trio.sleep(0.001)
                await trio.sleep(delay_s)
                nursery.cancel_scope.cancel()


async def read_all(house: House, body: dict[str, Any]) -> None:
    async with house.client.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_bytes():
            pass


async def test_where_migration_is_off_the_client_sees_why_its_answer_ended() -> None:
    async with open_house(router__migrations_max=0) as house:
        house.cut.at = 4
        response = await house.client.post(
            "/v1/completions", json={"prompt": "go on", "max_tokens": 16}
        )
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "disconnected")
        assert "router.migrations_max is 0" in error["message"]


async def test_a_choice_that_is_made_anew_counts_its_prompt_as_before() -> None:
    """That of the others, which come behind it in one place, is added to it."""
    async with open_house(can_resume=False, http__requests_max=1) as house:
        body = {"prompt": ["Say anything.", "Say more."], **GREEDY}
        plain = await house.ask(**body)
        assert plain["usage"]["prompt_tokens"] > len("Say anything.")
        assert await house.ask(5, **body) == plain
        assert house.cut.count == 1


async def test_an_answer_that_is_made_anew_tells_of_its_prompt_as_its_maker_found_it() -> None:
    async with open_house(can_resume=False) as house:
        body = {"prompt": "Say anything that fills a block.", **GREEDY}
        await house.ask(**body)
        await house.ask(prompt="Go on.")
        usage = (await house.ask(5, **body))["usage"]
        assert house.cut.count == 1
        # Which of the two is asked first is a matter of their ids.
        hits = sorted(engine.statistics().hit_tokens for engine in house.engines)
        assert (hits[0], hits[1] > 0) == (0, True)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_no_answer_goes_on_with_the_tokens_of_other_weights() -> None:
    """As when the pool of a model is replaced: who began it has withdrawn its card, and drains."""
    async with open_house(["old", "new"]) as house, trio.open_nursery() as nursery:
        old, new = house.workers
        body = {"prompt": "go on", "model": "exact", "max_tokens": 1800}
        path = "/v1/completions"
        async with house.client.stream("POST", path, json={**body, "stream": True}) as streamed:
            assert streamed.headers["x-trinamo-worker"] == old.instance_id
            nursery.start_soon(old.shutdown)
            answered_by = old.instance_id
            while answered_by != new.instance_id:
                asked = await house.client.post(path, json={**body, "max_tokens": 1})
                assert asked.status_code == 200
                answered_by = asked.headers["x-trinamo-worker"]
            house.cut.at = 1
            *_, last = parse_events(await streamed.aread())
        error = json.loads(last.data)["error"]
        assert error["code"] == "disconnected"
        assert "others serve the model by now, and contradict its card" in error["message"]
