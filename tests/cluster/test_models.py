"""Whose answer a request gets: real workers of several models behind one frontend."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests import needs
from tests.cluster.processes import Cluster, Member, chat, open_cluster, start, until
from tests.sources import ROOT
from trinamo.cli.doctor.discovery import discovery_findings
from trinamo.cli.doctor.finding import FindingVerdict
from trinamo.cli.running.locating import Target
from trinamo.cli.status.asking import survey_cluster
from trinamo.runtime.config.config import load_config
from trinamo.runtime.protocol.discovery.instances import INSTANCE_PREFIX
from trinamo.runtime.protocol.discovery.model_cards import MODEL_PREFIX, encode_card
from trinamo.runtime.protocol.openai.generate import ModelCard
from trinamo.transports.etcd import open_etcd

ENDPOINT = "trinamo/backend/generate"


@asynccontextmanager
async def one_more(cluster: Cluster, folder: Path, **settings: Any) -> AsyncIterator[Member]:
    """A worker beside those of the cluster, with an engine and a model of its own."""
    common = {
        "control_plane.etcd.endpoints": cluster.etcd.endpoint,
        "event_plane.nats.servers": cluster.nats.url,
        "event_plane.nats.token": cluster.nats.token,
    }
    changes = {f"worker.{name}": value for name, value in settings.items()}
    member = await start("worker", common | changes, folder / "more.log")
    try:
        yield member
    finally:
        await member.stop()
        assert member.process.stdout is not None
        await member.process.stdout.aclose()


async def ask(cluster: Cluster, text: str, model: str, **more: Any) -> httpx.Response:
    headers = more.pop("headers", {})
    return await cluster.client.post(
        f"{cluster.url}/v1/chat/completions",
        json=chat(text, model=model, max_tokens=8, temperature=0, **more),
        headers=headers,
    )


async def text_of(cluster: Cluster, text: str, model: str) -> str:
    response = await ask(cluster, text, model)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


async def model_view(cluster: Cluster, name: str) -> dict[str, Any]:
    told = (await cluster.client.get(f"{cluster.url}/status")).json()
    return next((model for model in told["models"] if model["name"] == name), {})


async def refused(cluster: Cluster, name: str) -> bool:
    return bool((await model_view(cluster, name)).get("refused_cards"))


async def test_two_models_on_one_endpoint_never_answer_for_each_other(tmp_path: Path) -> None:
    async with open_cluster(tmp_path, workers=1, engine="exact") as cluster:
        alone = await text_of(cluster, "one two", "exact")
        async with one_more(cluster, tmp_path, engine="echo", model_name="second"):
            await cluster.wait_models(2)
            await cluster.wait_live(2)
            for _ in range(20):
                assert await text_of(cluster, "one two", "second") == "one two"
                assert await text_of(cluster, "one two", "exact") == alone


@pytest.mark.parametrize(
    "second",
    [{"engine": "echo", "model_name": "exact"}, {"engine": "exact", "context_tokens_max": 64}],
    ids=["engine", "context"],
)
async def test_a_worker_whose_card_contradicts_the_model_s_is_told_of_and_not_asked(
    second: dict[str, Any], tmp_path: Path
) -> None:
    """Until the last worker that agreed is gone: then it is the model."""
    async with open_cluster(tmp_path, workers=1, engine="exact") as cluster:
        long = "word " * 40
        alone = await text_of(cluster, long, "exact")
        async with one_more(cluster, tmp_path, **second):
            await cluster.wait_live(2)
            await until(lambda: refused(cluster, "exact"), "the second card is refused")
            assert {await text_of(cluster, long, "exact") for _ in range(20)} == {alone}
            assert "it is not asked for 'exact'" in cluster.frontend.log.read_text()
            overrides = {"control_plane.etcd.endpoints": cluster.etcd.endpoint}
            target = Target(load_config(environ={}, overrides=overrides), None, is_named=True)
            survey = await survey_cluster(target)
            assert [(m.registered, m.refused) for m in survey.models] == [(2, 1)]
            assert "it is not asked for 'exact'" in survey.refused[0]
            found = await discovery_findings(target)
            told = [each.verdict for each in found if each.what == "models"]
            assert told == [FindingVerdict.GOOD, FindingVerdict.WARNING]
            kind = {"kind": "model"}
            assert await cluster.metric(cluster.url, "discovery_entries_refused_total", **kind) == 1
            await cluster.workers[0].stop()

            async def is_in_force() -> bool:
                return not (await model_view(cluster, "exact")).get("refused_cards")

            await until(is_in_force, "the second card is in force")
            assert (await ask(cluster, "hi", "exact")).status_code == 200


async def model_of(cluster: Cluster, model: str, **more: Any) -> str:
    """The name that the answer carries."""
    response = await ask(cluster, "hi", model, **more)
    assert response.status_code == 200, response.text
    return str(response.json()["model"])


async def test_one_process_serves_several_models_each_by_name_and_alias(tmp_path: Path) -> None:
    """An answer carries the name that was asked for; blocks and load are told per endpoint."""
    lines = "one=exact;alias=gpt-4,two=echo;alias=parrot"
    async with open_cluster(tmp_path, workers=0) as cluster:
        async with one_more(cluster, tmp_path, models=lines) as member:
            assert member.facts["model"] == "one, two"
            await cluster.wait_models(4)
            await cluster.wait_live(2)
            exact = await text_of(cluster, "say it", "one")
            assert exact != "say it"
            for _ in range(8):
                assert await text_of(cluster, "say it", "gpt-4") == exact
                assert await text_of(cluster, "say it", "parrot") == "say it"
            assert [await model_of(cluster, name) for name in ("two", "parrot")] == [
                "two",
                "parrot",
            ]
            listed = (await cluster.client.get(f"{cluster.url}/v1/models")).json()["data"]
            assert {each["id"]: each["root"] for each in listed} == {
                "one": "one",
                "gpt-4": "one",
                "two": "two",
                "parrot": "two",
            }
            url = str(member.facts["status_url"])
            for model in ("one", "two"):
                endpoint = f"trinamo/backend/generate-{model}"
                assert await cluster.metric(url, "worker_requests_total", endpoint=endpoint) > 0

        async def is_gone() -> bool:
            return not (await cluster.client.get(f"{cluster.url}/v1/models")).json()["data"]

        await until(is_gone, "the models and their aliases are gone")


async def test_an_alias_that_another_model_has_is_refused_and_said(tmp_path: Path) -> None:
    settings = {"worker.model_aliases": "chat"}
    async with (
        open_cluster(tmp_path, workers=1, engine="echo", settings=settings) as cluster,
        one_more(cluster, tmp_path, engine="exact", model_aliases="chat"),
    ):
        await cluster.wait_models(3)
        await cluster.wait_live(2)
        assert {await text_of(cluster, "say it", "chat") for _ in range(8)} == {"say it"}
        why = "alias 'chat' of 'exact' is refused: it means 'echo'"
        assert why in cluster.frontend.log.read_text()
        overrides = {"control_plane.etcd.endpoints": cluster.etcd.endpoint}
        target = Target(load_config(environ={}, overrides=overrides), None, is_named=True)
        survey = await survey_cluster(target)
        assert survey.refused == [why]
        assert {m.name: m.aliases for m in survey.models} == {"echo": ["chat"], "exact": []}
        told = [each for each in await discovery_findings(target) if each.what == "models"]
        assert [each.verdict for each in told] == [FindingVerdict.GOOD, FindingVerdict.WARNING]
        assert (why in told[1].text, "echo (also chat)" in told[0].text) == (True, True)


async def test_a_client_may_name_the_worker_and_is_told_who_has_answered(tmp_path: Path) -> None:
    settings = {"router.policy": "direct"}
    async with open_cluster(tmp_path, engine="echo", settings=settings) as cluster:
        ids = {str(worker.facts["instance_id"]) for worker in cluster.workers}
        for instance_id in sorted(ids):
            headers = {"X-Trinamo-Worker": instance_id}

            async def is_there(headers: dict[str, str] = headers) -> bool:
                return (await ask(cluster, "hi", "echo", headers=headers)).status_code == 200

            # The frontend learns of an instance first, and then that it serves the model, too.
            await until(is_there, f"{instance_id} serves the model")
            for stream in (False, True):
                response = await ask(cluster, "hi", "echo", headers=headers, stream=stream)
                assert response.headers["x-trinamo-worker"] == instance_id, response.text
        nobody = await ask(cluster, "hi", "echo")
        assert (nobody.status_code, "X-Trinamo-Worker" in nobody.text) == (400, True)
        for wrong, status in (("feed", 503), ("no id", 400), ("f" * 17, 400)):
            headers = {"X-Trinamo-Worker": wrong}
            assert (await ask(cluster, "hi", "echo", headers=headers)).status_code == status


@pytest.mark.check
async def test_cards_of_the_older_layout_are_understood_from_etcd3_which_reads_ours(
    tmp_path: Path,
) -> None:
    """`models/chat/<name>` names no instance: any that serves the model is asked."""
    if importlib.util.find_spec("etcd3") is None:
        needs.ETCD3.lacking()
    card = encode_card(ModelCard(name="org/other", endpoint=ENDPOINT)).decode()
    seen: list[dict[str, Any]] = []
    async with open_cluster(tmp_path, workers=0) as cluster, trio.open_nursery() as nursery:
        command = [sys.executable, str(ROOT / "tests/conformance/control/etcd3_client.py")]
        client: trio.Process = await nursery.start(
            partial(
                trio.run_process,
                [*command, cluster.etcd.endpoint, "models/chat/org/other", card],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"},
            )
        )

        async def read() -> None:
            assert client.stdout is not None
            rest = b""
            async for data in client.stdout:
                *lines, rest = (rest + data).split(b"\n")
                seen.extend(map(json.loads, lines))

        nursery.start_soon(read)
        await cluster.wait_models()
        assert (await ask(cluster, "say it", "org/other")).status_code == 503
        async with one_more(cluster, tmp_path, engine="echo", model_name="org/other"):
            await cluster.wait_live(1)
            for _ in range(6):
                assert await text_of(cluster, "say it", "org/other") == "say it"
            assert client.stdin is not None
            await client.stdin.send_all(b"\n")
            await until(heard(seen, "keys"), "etcd3 reads what is there")

        async def has_gone() -> bool:
            return not (await cluster.client.get(f"{cluster.url}/v1/models")).json()["data"]

        await until(has_gone, "the model goes with its cards")
        await client.stdin.aclose()
    (keys,) = [each["keys"] for each in seen if "keys" in each]
    assert any(key.startswith(INSTANCE_PREFIX) for key in keys)
    (ours,) = [key for key in keys if key.startswith(MODEL_PREFIX) and "/chat/" not in key]
    events = [(each["event"], each["key"]) for each in seen if "event" in each]
    assert ("PutEvent", ours) in events
    assert ("DeleteEvent", ours) in events
    assert ("DeleteEvent", "models/chat/org/other") in events


def heard(seen: list[dict[str, Any]], what: str) -> Callable[[], Awaitable[bool]]:
    async def is_there() -> bool:
        return any(what in each for each in seen)

    return is_there


POISON: list[Any] = [
    {"tcp": "[::1%\0]:80"},
    {"tcp": "[::1%\x1b[31m]:80"},
    {"tcp": "host:0"},
    {"tcp": "host:99999999999999999999"},
    {"tcp": "host:\uff18\uff10"},
    {"tcp": "a..b:80"},
    {"tcp": "\udfff:80".encode("utf-8", "replace").decode()},
    {"tcp": ""},
    {"tcp": "x" * 70_000 + ":1"},
    {"tcp": "-host:1"},
    {"tcp": "[127.0.0.1]:80"},
    {"tcp": "host name:80"},
    {"tcp": "127.0.0.1:1"},
    {"nats": "a subject\r\nPUB x 1\r\n\r\n"},
    {"\n": "x"},
    {},
]


async def test_poison_in_discovery_harms_neither_the_frontend_nor_a_request(tmp_path: Path) -> None:
    async with (
        open_cluster(tmp_path, workers=1, engine="echo") as cluster,
        open_etcd([cluster.etcd.endpoint]) as etcd,
    ):
        for number, transports in enumerate(POISON):
            each = {"endpoint": ENDPOINT, "id": f"{number:x}", "transports": transports}
            key = f"{INSTANCE_PREFIX}{ENDPOINT}/{number:x}"
            await etcd.put(key, json.dumps(each).encode())
            await etcd.put(f"{MODEL_PREFIX}m{number}/{number:x}", json.dumps(each).encode())
        for number, value in enumerate((b"", b"\xff", b"null", b"[" * 100_000, b'{"id":1}')):
            await etcd.put(f"{INSTANCE_PREFIX}{ENDPOINT}/f{number}", value)
            await etcd.put(f"{MODEL_PREFIX}\x1b[2J{number}/%00/", value)
        for _ in range(30):
            assert await text_of(cluster, "hi", "echo") == "hi"
        assert cluster.frontend.is_running
