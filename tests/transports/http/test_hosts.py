"""The Host header: by which names a server may be called."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import trio

from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.env import RealEnv
from trinamo.runtime.http.app import HealthAnswer, build_status_app
from trinamo.runtime.traces.ring import Traces
from trinamo.runtime.worker.metrics import WorkerMetrics
from trinamo.transports.http.driver import HostPolicy
from trinamo.transports.http.server import Server

OWN = ["localhost", "LOCALHOST:8787", "localhost.", "127.0.0.1:1", "[::1]:80", "[::1]", "10.0.0.7"]
FOREIGN = ["evil.example", "evil.example:8787", "localhost.evil.example", "127.0.0.1.nip.io", ""]


@pytest.mark.parametrize("host", OWN)
@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1"])
def test_addresses_and_loopback_names_are_always_allowed(bound: str, host: str) -> None:
    assert HostPolicy.make(bound, None).allows(host.encode())
    assert HostPolicy.make(bound, ()).allows(host.encode())


@pytest.mark.parametrize("host", FOREIGN)
def test_on_loopback_no_other_name_is_allowed(host: str) -> None:
    assert not HostPolicy.make("127.0.0.1", None).allows(host.encode())


def test_a_server_that_faces_a_network_allows_any_name_until_it_is_given_some() -> None:
    assert HostPolicy.make("0.0.0.0", None).allows(b"llm.example:80")
    named = HostPolicy.make("0.0.0.0", ("LLM.example",))
    assert named.allows(b"llm.example:80")
    assert not named.allows(b"evil.example")


def test_a_star_allows_any_name_and_the_bound_name_is_one() -> None:
    assert HostPolicy.make("127.0.0.1", ("*",)).allows(b"evil.example")
    assert HostPolicy.make("node7", ()).allows(b"NODE7:8787")


def test_http_1_0_needs_no_host() -> None:
    assert HostPolicy.make("127.0.0.1", None).allows(None)


async def test_a_page_that_gave_its_name_our_address_reads_nothing(serve: Any) -> None:
    """DNS rebinding: the browser connects to us, and asks for the page's own name."""
    running = await serve()
    async with running.client() as client:
        for path in ("/v1/models", "/metrics", "/status"):
            response = await client.get(path, headers={"host": "evil.example:8787"})
            assert response.status_code == 421
            assert response.json()["error"]["code"] == "host_not_allowed"
        body = {"messages": [{"role": "user", "content": "hi"}]}
        response = await client.post(
            "/v1/chat/completions", json=body, headers={"host": "evil.example"}
        )
        assert response.status_code == 421
        assert (await client.get("/live", headers={"host": "localhost:1"})).status_code == 200
    assert running.engine.requests == []
    await running.wait_quiet()


async def test_a_name_from_the_configuration_is_allowed(serve: Any) -> None:
    running = await serve(hosts=("llm.example",))
    async with running.client() as client:
        response = await client.get("/live", headers={"host": "llm.example"})
    assert response.status_code == 200
    await running.wait_quiet()


async def test_a_worker_s_status_port_is_no_page_s_either() -> None:
    metrics = WorkerMetrics(RealEnv())
    app = build_status_app(metrics, Traces(metrics.clock, 0), lambda: HealthAnswer("ready"))
    server = Server(app, HttpConfig(port=0), metrics=metrics, rng=RealEnv().rng)
    async with trio.open_nursery() as nursery:
        port = await nursery.start(server.serve)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=120
        ) as client:
            response = await client.get("/metrics", headers={"host": "evil.example"})
        assert response.status_code == 421
        server.close()
