"""Clients' keys: who needs one, what a wrong one is told, and files that change."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import openai
import pytest
import trio

from tests.runtime.http.running import on_every_server
from tests.runtime.one_process import OneProcess
from tests.runtime.small_cluster import open_small_cluster
from tests.transports.openai.fake import ask_until, open_fake, open_front
from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import ConfigError
from trinamo.runtime.http.admission.keys import KEYS_MAX, ApiKeys
from trinamo.runtime.http.status import UnauthorizedError
from trinamo.runtime.logs.access import ACCESS_LOGGER
from trinamo.runtime.metrics.metrics import Metrics

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"
ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "keys"
    found.write_text(f"# Of the team.\nalice: {ALICE}\n\n{BOB}\n", "utf-8")
    found.chmod(0o600)
    return found


@pytest.fixture
def marked(file: Path) -> Path:
    """Alice's key, and Bob's, who is an operator."""
    file.write_text(f"alice: {ALICE}\nbob (operator): {BOB}\n", "utf-8")
    return file


def keys_of(**section: Any) -> ApiKeys:
    env = RealEnv()
    return ApiKeys(HttpConfig(**section), env.rng, Metrics(env))


def bearer(key: str) -> Any:
    return [(b"authorization", f"Bearer {key}".encode())]


@on_every_server
async def test_only_those_with_a_key_are_answered(serve: Any, file: Path) -> None:
    running = await serve(api_keys_file=str(file))
    async with running.client() as client:
        for headers in ({}, {"authorization": "Bearer sk-nobody"}, {"authorization": ALICE}):
            response = await client.post(PATH, json=HELLO, headers=headers)
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        for key in (ALICE, BOB):
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.post(PATH, json=HELLO, headers=headers)).status_code == 200
    for name in ("alice", "line4"):
        assert running.value("key_requests_total", key=name) == 1
    assert (
        running.value("requests_total", model="unknown", endpoint="chat", outcome="invalid_api_key")
        == 3
    )
    await running.wait_quiet()


async def test_a_request_says_whose_it_is_and_not_by_which_key(serve: Any, file: Path) -> None:
    """Keys of one name are one tenant's, wherever they stand in whichever file; others are others."""
    running = await serve(api_keys_file=str(file))
    async with running.client() as client:
        for key in (ALICE, BOB, ALICE):
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.post(PATH, json=HELLO, headers=headers)).status_code == 200
    alice, bob, again = (request.tenant for request in running.engine.requests)
    assert alice == again != bob
    assert not {alice, bob} & {"alice", "line4", ALICE, BOB}
    other = file.with_name("other")
    other.write_text(f"{BOB}\nalice: sk-alice-the-next-one\n", "utf-8")
    elsewhere = keys_of(api_keys_file=str(other))
    assert elsewhere.check(bearer(BOB)).tenant == bob
    assert elsewhere.check(bearer("sk-alice-the-next-one")).tenant == alice


@on_every_server
async def test_without_keys_all_are_one_tenant(serve: Any) -> None:
    running = await serve()
    async with running.client() as client:
        assert (await client.post(PATH, json=HELLO)).status_code == 200
    assert [request.tenant for request in running.engine.requests] == [""]


@on_every_server
async def test_what_tells_of_all_clients_is_for_operators(serve: Any, marked: Path) -> None:
    """A tenant learns of no other: no figures, no workers, no traces; nor does who has no key."""
    running = await serve(api_keys_file=str(marked))
    headers = [{"authorization": f"Bearer {key}"} for key in (ALICE, BOB)]
    async with running.client() as client:
        for path, status in (("/metrics", 200), ("/status", 200), ("/traces/x", 200), ("/no", 404)):
            answers = [await client.get(path, headers=each) for each in headers]
            assert [each.status_code for each in answers] == [403, status]
            assert answers[0].json()["error"]["code"] == "operators_only"
        for path in ("/v1/models", "/openapi.json"):
            for each in headers:
                assert (await client.get(path, headers=each)).status_code == 200
        assert (await client.get("/health")).json()["status"] == "ready"
    await running.wait_quiet()


async def test_only_operators_are_told_who_answers(marked: Path) -> None:
    async with open_small_cluster(router__policy="kv", http__api_keys_file=str(marked)) as cluster:
        told: list[set[str]] = []
        for key in (ALICE, BOB):
            cluster.http.headers["authorization"] = f"Bearer {key}"
            answer = await cluster.ask()
            assert answer.status_code == 200
            told.append({each for each in answer.headers if each.startswith("x-trinamo")})
    assert told == [set(), {"x-trinamo-worker", "x-trinamo-cached-blocks"}]


@on_every_server
async def test_wrong_keys_cost_a_line_a_second(
    serve: Any, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    running = await serve(api_keys_file=str(file))
    async with running.client() as client:
        began = trio.current_time()
        for _ in range(30):
            headers = {"authorization": "Bearer sk-wrong"}
            assert (await client.post(PATH, json=HELLO, headers=headers)).status_code == 401
        took_s = trio.current_time() - began
    await running.wait_quiet()
    lines = [each for each in caplog.records if each.name == ACCESS_LOGGER]
    # However long the thirty took.
    assert 1 <= len(lines) <= 1 + took_s


@on_every_server
async def test_all_but_health_needs_a_key(serve: Any, file: Path) -> None:
    """What tells names, figures and requests is for those who have one; a balancer has none."""
    running = await serve(api_keys_file=str(file))
    async with running.client() as client:
        for path in ("/health", "/live"):
            assert (await client.get(path)).status_code == 200
        for path in ("/v1/models", "/metrics", "/status", "/openapi.json", "/traces/x", "/none"):
            response = await client.get(path)
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        headers = {"authorization": f"bearer {ALICE}"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
        encoded = await client.post("/v1/chat%2Fcompletions", json=HELLO)
        assert encoded.status_code in (401, 404)
    await running.wait_quiet()


async def test_the_official_client_sends_its_key(serve: Any, file: Path) -> None:
    running = await serve(api_keys_file=str(file))
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=ALICE) as client:
        answer = await client.completions.create(model="local", prompt="hi")
        assert answer.choices[0].text
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-nobody").models.list()


async def test_lines_tell_the_key_by_its_name_alone(
    serve: Any, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    running = await serve(api_keys_file=str(file))
    async with running.client() as client:
        headers = {"authorization": f"Bearer {ALICE}"}
        await client.post(PATH, json=HELLO, headers=headers)
        await client.post(PATH, json=HELLO, headers={"authorization": "Bearer sk-wrong"})
    await running.wait_quiet()
    assert [each for each in caplog.records if each.name == ACCESS_LOGGER]
    told = "\n".join(str(vars(record)) for record in caplog.records)
    assert ALICE not in told
    assert "sk-wrong" not in told


def test_a_changed_file_counts_and_a_broken_one_does_not(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(api_keys_file=str(file))
    assert keys.check(bearer(ALICE)).name == "alice"
    other = file.with_name("other")
    other.write_text("carol: sk-carol-0123456789\n", "utf-8")
    other.replace(file)
    keys.renew()
    assert keys.check(bearer("sk-carol-0123456789")).name == "carol"
    with pytest.raises(UnauthorizedError):
        keys.check(bearer(ALICE))
    other.write_text("carol: short\n", "utf-8")
    other.replace(file)
    keys.renew()
    assert "the old ones stay" in caplog.text
    assert keys.check(bearer("sk-carol-0123456789")).name == "carol"
    file.unlink()
    keys.renew()
    assert keys.check(bearer("sk-carol-0123456789")).name == "carol"
    other.write_text("# Nobody for now.\n", "utf-8")
    other.replace(file)
    keys.renew()
    with pytest.raises(UnauthorizedError):
        keys.check(bearer("sk-carol-0123456789"))
    assert "nobody is let in" in caplog.text


async def test_a_running_frontend_takes_up_a_changed_file(
    serve: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinamo.runtime.http.admission.keys.LOOK_INTERVAL_S", 0.01)
    running = await serve(api_keys_file=str(file))
    other = file.with_name("other")
    other.write_text("sk-new-0123456789\n", "utf-8")
    other.replace(file)
    async with running.client() as client:
        headers = {"authorization": "Bearer sk-new-0123456789"}
        with trio.fail_after(120):
            while (await client.get("/v1/models", headers=headers)).status_code != 200:
                await trio.sleep(0.01)


def test_a_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", f" {ALICE}\n")
    key = keys_of(api_key_env="MY_KEY").check(bearer(ALICE))
    assert (key.name, key.is_operator) == ("env", True)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match="no environment variable MY_KEY"):
        keys_of(api_key_env="MY_KEY")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        ("short\n", "line 1: a key has 8 to 512"),
        ("two words here\n", "line 1"),
        (f"a: {ALICE}\nb: {ALICE}\n", "line 2: the key is there twice"),
        ("x" * (2 << 20), "is longer than"),
        ("".join(f"key-number-{n}\n" for n in range(KEYS_MAX + 1)), "holds more than"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=why) as refused:
        keys_of(api_keys_file=str(file))
    assert ALICE not in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        keys_of(api_keys_file=str(tmp_path / "none"))


def test_what_is_unwise_is_told(file: Path) -> None:
    assert keys_of(api_keys_file=str(file)).find_faults() == []
    file.chmod(0o640)
    away = keys_of(api_keys_file=str(file), host="0.0.0.0").find_faults()
    assert ["clear text" in away[0], "chmod 600" in away[1]] == [True, True]


async def test_before_upstreams_the_clients_key_stays_here_and_the_upstream_gets_ours(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", "sk-of-the-upstream")
    body = {"model": "m", **HELLO}
    async with open_fake() as fake:
        settings = {"http__api_keys_file": str(file), "http__upstreams": fake.url}
        key_env = {"worker__upstream__key_env": "UPSTREAM_KEY"}
        async with open_front(OneProcess(), **settings, **key_env) as front:
            assert (await front.client.post(PATH, json=body)).status_code == 401
            front.client.headers["authorization"] = f"Bearer {ALICE}"
            await front.wait_model()
            await ask_until(front, lambda: fake.asked)
    assert {each.headers["authorization"] for each in fake.asked} == {"Bearer sk-of-the-upstream"}
