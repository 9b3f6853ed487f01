"""A running service per test."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from tests.certificates import Authority
from tests.runtime.http.running import Generate, LocalEngine, Running, say_hello
from trinamo import HttpService
from trinamo.runtime.protocol.openai.generate import Feature, ModelCard


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def http_server() -> str:
    """Who speaks HTTP, one of `SERVERS`; parametrized where all must behave the same."""
    return "native"


@pytest.fixture
async def serve(http_server: str, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """`await serve(function, **settings)` starts a service and returns it `Running`."""
    started: list[Running] = []
    own: dict[str, Any] = {"server": http_server}
    trusted: str | None = None
    if http_server == "tls":
        authority: Authority = request.getfixturevalue("authority")
        certificate, key = authority.sign("server")
        own = {"tls": {"certificate_file": str(certificate), "key_file": str(key)}}
        trusted = str(authority.ca_file)
    async with trio.open_nursery() as nursery:

        async def start(function: Generate = say_hello, **settings: Any) -> Running:
            settings = {"port": 0, **own, **settings}
            service = HttpService.builder().config(**settings).build()
            engine = LocalEngine(function)
            trust = None if trusted is None else ssl.create_default_context(cafile=trusted)
            card = ModelCard(name="local", endpoint="a/b/c", features=list(Feature))
            service.model_manager().add_model(card, engine)
            running = Running(service, engine, await nursery.start(service.run), trust)
            started.append(running)
            return running

        start.section = own.get("tls")  # type: ignore[attr-defined]
        yield start
        for running in started:
            running.service.stop()
        nursery.cancel_scope.cancel()
    for running in started:
        assert running.service.admission.in_flight == 0
        assert running.engine.running == 0
        assert running.value("connections", kind="http") == 0
        for endpoint in ("chat", "completions", "responses", "messages", "embeddings"):
            assert running.value("requests_in_flight", model="local", endpoint=endpoint) == 0
