"""KV of other engines and in other layouts, between real processes: the text of one engine alone."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.cluster.processes import Cluster, Member, chat, open_cluster, until
from tests.needs import MOONCAKE, NIXL, Need
from trinamo.runtime.context import Context
from trinamo.runtime.engines.exact.engine import open_exact_engine
from trinamo.runtime.engines.loop.host import EngineHost
from trinamo.runtime.protocol.openai.generate import ChatMessage, GenerateRequest

ANSWER_TOKENS = 16
THINGS = ("cats", "sea", "bridge", "bread", "winter", "train", "violin", "rain", "gold", "bees")
QUESTIONS = [
    *(f"Write one sentence about this: {thing}." for thing in THINGS),
    *(f"Name three things that go well with {thing}, and say why." for thing in THINGS),
]
BACKENDS: dict[str, tuple[Need | None, dict[str, Any]]] = {
    "tcp": (None, {}),
    "nixl": (NIXL, {"data_plane.nixl.enabled": True}),
    "mooncake": (MOONCAKE, {"data_plane.mooncake.enabled": True}),
}


async def alone(engine: EngineHost, questions: Sequence[str]) -> list[str]:
    answers = []
    for text in questions:
        request = GenerateRequest(
            model="any",
            messages=[ChatMessage("user", text)],
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            # A prefix that another question left would be of another batch, whose last digit may differ.
            tenant=text,
        )
        deltas = [delta async for delta in engine.generate(request, Context("alone"))]
        answers.append("".join(delta.text for delta in deltas))
    return answers


def key_of(number: int) -> str:
    return f"sk-of-question-{number}"


async def answers(cluster: Cluster, model: str, questions: Sequence[str]) -> list[str]:
    """What each, asked by a tenant of its own where there are keys, is answered."""
    found = []
    url = f"{cluster.url}/v1/chat/completions"
    for number, text in enumerate(questions):
        # As `alone` does, without the defaults that come with a model.
        asked = chat(text, max_tokens=ANSWER_TOKENS, temperature=0, repetition_penalty=1)
        body = {**asked, "model": model}
        key = {"authorization": f"Bearer {key_of(number)}"}
        response = await cluster.client.post(url, json=body, headers=key)
        assert response.status_code == 200, response.text
        found.append(str(response.json()["choices"][0]["message"]["content"]))
    return found


@asynccontextmanager
async def pair(
    directory: Path, engine: str, **settings: Any
) -> AsyncIterator[tuple[Cluster, Member, Member]]:
    """A decode worker and a prefill worker, once the first knows the second; a key a question."""
    keys = directory / "keys"
    keys.write_text("".join(f"q{n} (operator): {key_of(n)}\n" for n in range(len(QUESTIONS))))
    keys.chmod(0o600)
    async with open_cluster(
        directory,
        roles=["decode", "prefill"],
        engine=engine,
        key=key_of(0),
        settings={
            "http.api_keys_file": str(keys),
            "disaggregation.prefill_tokens_local_max": 1,
            # After these the decode worker computes a prompt by itself.
            "disaggregation.queue_timeout_s": 60,
            "data_plane.transfer.probe_timeout_s": 60,
            **settings,
        },
    ) as cluster:
        decode, prefill = cluster.workers

        async def is_known() -> bool:
            health = await cluster.client.get(f"{decode.facts['status_url']}/health")
            return bool(health.json()["disaggregation"]["prefill_workers"])

        await until(is_known, "the prefill worker is found")
        yield cluster, decode, prefill


async def metric(cluster: Cluster, member: Member, name: str, **labels: str) -> float:
    return await cluster.metric(str(member.facts["status_url"]), name, **labels)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=[pytest.mark.check] if need else [])
        for name, (need, _) in BACKENDS.items()
    ],
)
async def test_blocks_in_a_buffer_a_layer_move_by_every_backend(
    tmp_path: Path, backend: str
) -> None:
    need, settings = BACKENDS[backend]
    if need is not None:
        need.imported()
    questions = QUESTIONS[:5]
    settings = {"worker.kv_layout": "per_layer", **settings}
    async with pair(tmp_path, "exact", **settings) as (cluster, decode, prefill):
        found = await answers(cluster, "exact", questions)
        blocks = await metric(cluster, decode, "remote_prefill_blocks_total")
        moved = [
            await metric(cluster, each, "transfer_bytes_total", backend=backend)
            for each in (decode, prefill)
        ]
        # Prefill first: the decode worker reads.
        page = (await cluster.client.get(f"{decode.facts['status_url']}/metrics")).text

    async with open_exact_engine() as engine:
        assert found == await alone(engine, questions)
    assert blocks > len(questions)
    assert sum(moved) == blocks * 16 * 1024
    for name in ("nixl_transfer_latency_count", "nixl_bandwidth_gbps", "nixl_error_rate"):
        (shown,) = re.findall(rf'^{name}{{backend="{backend}"}} (\S+)$', page, re.MULTILINE)
        assert (float(shown) > 0) is (name != "nixl_error_rate")


@pytest.mark.check
@pytest.mark.parametrize(("mode", "count"), [("decode_first", 20), ("prefill_first", 4)])
async def test_a_language_model_answers_the_same_whichever_process_has_read_the_prompt(
    tmp_path: Path, mode: str, count: int
) -> None:
    needs.LLAMACPP.imported()
    from trinamo.runtime.engines.llamacpp.engine import open_llamacpp_engine
    from trinamo.runtime.engines.llamacpp.model_file import MODEL_NAME

    questions = QUESTIONS[:count]
    settings = {
        "disaggregation.mode": mode,
        "worker.context_tokens_max": 512,
        # Two workers that are started by themselves would each take all cores, and wait by spinning.
        "worker.threads": 1,
    }
    async with pair(tmp_path, "llamacpp", **settings) as (cluster, decode, prefill):
        found = await answers(cluster, MODEL_NAME, questions)
        remote = await metric(cluster, decode, "prefills_total", where="remote", mode=mode)
        computed = await metric(cluster, decode, "engine_prompt_tokens_total")
        elsewhere = await metric(cluster, prefill, "engine_prompt_tokens_total")

    # Only then is each computed as by one engine alone.
    assert (remote, computed) == (count, 0)
    async with open_llamacpp_engine(context_tokens_max=512, threads=1) as engine:
        assert found == await alone(engine, questions)
        once = engine.statistics()
    # It computes every prompt, whole and once: none is of the tenant of another.
    assert (elsewhere, once.hit_tokens) == (once.prompt_tokens, 0)
