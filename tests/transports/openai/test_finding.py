"""Where an upstream is, what it is called, and what it tells of itself."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.transports.openai.dialects import RECORDED
from tests.transports.openai.fake import FAST, open_cluster, open_fake, says, until, whole
from trinamo.runtime.config.upstream import UpstreamConfig
from trinamo.runtime.errors import ConfigError, ConnectError
from trinamo.runtime.planes.upstreams import Load
from trinamo.transports.openai import watch
from trinamo.transports.openai.address import find_address
from trinamo.transports.openai.engine import open_upstream_engine
from trinamo.transports.openai.upstream import open_upstream
from trinamo.transports.openai.watch import parse_load


async def test_a_worker_says_what_it_cannot_find() -> None:
    async with open_fake() as fake:
        fake.models = [{"id": "a"}, {"id": "b"}]
        with pytest.raises(ConfigError, match="several models \\(a, b\\)"):
            async with open_upstream_engine(UpstreamConfig(url=fake.url, **FAST)):
                pass
        with pytest.raises(ConfigError, match="does not list the model 'c'"):
            async with open_upstream_engine(UpstreamConfig(url=fake.url, model="c", **FAST)):
                pass
        async with open_upstream_engine(UpstreamConfig(url=fake.url, **FAST), model="b") as engine:
            assert engine.info.model == "b"
    limits: dict[str, Any] = {**FAST, "start_timeout_s": 0.2}
    with pytest.raises(ConnectError, match="no model after"):
        async with open_upstream_engine(UpstreamConfig(url=fake.url, **limits)):
            pass


async def test_the_key_is_sent_and_never_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", "sk-very-secret")
    caplog.set_level(logging.DEBUG)
    section = UpstreamConfig(key_env="UPSTREAM_KEY")
    assert "very-secret" not in repr(find_address("http://a/v1", section))
    async with (
        open_fake(says(whole(b"boom", 500))) as fake,
        open_cluster(fake.url, key_env="UPSTREAM_KEY") as front,
    ):
        answer = await front.chat()

    assert fake.asked[0].headers["authorization"] == "Bearer sk-very-secret"
    assert "very-secret" not in answer.text + caplog.text


@pytest.mark.parametrize(
    ("url", "is_told"),
    [
        ("http://192.0.2.1:9/v1", True),
        ("http://127.0.0.1:9/v1", False),
        ("http://localhost:9", False),
        ("https://192.0.2.1:9/v1", False),
    ],
)
async def test_a_key_that_others_can_read_on_its_way_is_told_of(
    url: str, *, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", "sk-very-secret")
    async with open_upstream(url, UpstreamConfig()):
        assert "unencrypted" not in caplog.text
    async with open_upstream(url, UpstreamConfig(key_env="UPSTREAM_KEY")):
        assert (f"the key goes to {url} unencrypted" in caplog.text) is is_told
    assert "very-secret" not in caplog.text


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("ftp://a/v1", "no URL"),
        ("http://user:pw@a/v1", "password"),
        ("http://a b/v1", "blanks"),
        ("http://a:x/v1", "wrong"),
        ("a:8000", "no URL"),
    ],
)
def test_a_wrong_url_is_refused_with_a_sentence(url: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as raised:
        find_address(url, UpstreamConfig())
    assert "pw" not in str(raised.value)


def test_a_url_without_a_path_means_the_first_version() -> None:
    found = find_address("http://[::1]:8000", UpstreamConfig())

    assert (found.host, found.port, found.path, found.root) == ("::1", 8000, "/v1", "")


PAGES = {
    "vllm": """
vllm:num_requests_running{model_name="m",engine="0"} 2.0
vllm:num_requests_running{model_name="m",engine="1"} 1.0
vllm:num_requests_waiting{model_name="m"} 4.0
vllm:kv_cache_usage_perc{model_name="m"} 0.25
""",
    "sglang": """
sglang:num_running_reqs{model_name="m"} 5
sglang:num_queue_reqs 1
sglang:token_usage 0.5
""",
    "llamacpp": (RECORDED / "metrics.txt").read_text(),
    "another": "python_gc_objects_collected_total 3\n",
    "nonsense": "vllm:num_requests_running NaN\n",
}


@pytest.mark.parametrize(
    ("server", "load"),
    [
        ("vllm", Load(3, 4, 0.25)),
        ("sglang", Load(5, 1, 0.5)),
        ("llamacpp", Load(1, 0, 0.0)),
        ("another", None),
        ("nonsense", None),
    ],
)
def test_load_is_read_off_the_metrics_of_each_server(server: str, load: Load | None) -> None:
    assert parse_load(PAGES[server].encode()) == load


async def test_a_page_of_metrics_that_is_too_long_tells_nothing() -> None:
    """It would be read between the tokens of others."""
    async with open_fake() as fake, open_upstream(fake.url, UpstreamConfig(**FAST)) as upstream:
        fake.metrics = PAGES["sglang"].encode()
        await until(lambda: upstream.view.load == Load(5, 1, 0.5))
        fake.metrics += b"# more\n" * (1 << 18)
        await until(lambda: upstream.view.load is None)
        assert upstream.view.is_healthy


async def test_what_an_upstream_has_not_is_asked_for_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server may be replaced by another kind, or have been asked before it was whole."""
    monkeypatch.setattr(watch, "_ABSENT_S", 0.1)
    async with open_fake() as fake, open_upstream(fake.url, UpstreamConfig(**FAST)) as upstream:
        fake.health = 404
        await until(lambda: upstream.view.models)
        assert (upstream.view.is_healthy, upstream.view.load) == (True, None)
        fake.metrics = PAGES["llamacpp"].encode()
        await until(lambda: upstream.view.load == Load(1, 0, 0.0))
        fake.health = 503
        await until(lambda: not upstream.view.is_healthy)


@pytest.mark.parametrize("none", [[], None], ids=["as vLLM", "as Ollama"])
async def test_who_lists_no_model_any_more_is_well_and_has_none(none: Any) -> None:
    async with open_fake() as fake, open_upstream(fake.url, UpstreamConfig(**FAST)) as upstream:
        await until(lambda: upstream.view.models)
        fake.models = none
        await until(lambda: not upstream.view.models)
        assert upstream.view.is_healthy
