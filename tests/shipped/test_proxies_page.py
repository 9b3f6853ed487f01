"""nginx, HAProxy and Caddy as their page has them, before a frontend whose engine says a word when told to."""

from __future__ import annotations

import os
import signal
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import httpx
import pytest

from tests.certificates import Authority
from tests.cli.places import Place, RunningCluster, cluster, wait_for
from tests.machines.proxies import HOST, PROXIES, Proxy, proxied

pytestmark = [pytest.mark.check]

KEY: Final = "a-key-of-some-length"
WORDS: Final = 5
CHAT: Final = "/v1/chat/completions"
CHECKS_S: Final = 5.0
"""In which a proxy asks twice at least how a frontend is."""
ENGINE: Final = """
import time

import trio
from pathlib import Path

while Path({gates!r}, "away").exists():
    time.sleep(0.01)

async def engine(request, context):
    for number in range({words}):
        while not Path({gates!r}, f"{{request.max_tokens}}-{{number}}").exists():
            await trio.sleep(0.01)
        yield f"word{{number}} "
"""


@attrs.frozen
class Site:
    """A frontend whose engine waits for a gate before each word, and the certificate of its proxy.

    Nor does a worker start while the gate `away` is there.
    """

    running: RunningCluster
    gates: Path
    authority: Authority

    def open_gate(self, request: int, number: int) -> None:
        (self.gates / f"{request}-{number}").touch()

    def in_flight(self) -> float:
        """Requests that the frontend has, as it says."""
        text = httpx.get(
            f"{self.running.url}/metrics", headers=bearer(), trust_env=False, timeout=120
        ).text
        lines = [
            line for line in text.splitlines() if line.startswith("trinamo_requests_in_flight{")
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def bearer() -> dict[str, str]:
    return {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("site")
    gates = root / "gates"
    gates.mkdir()
    (root / "mine.py").write_text(ENGINE.format(words=WORDS, gates=str(gates)))
    keys = root / "keys.txt"
    keys.write_text(f"me (operator): {KEY}\n")
    keys.chmod(0o600)
    options = ("--engine", "./mine.py:engine", "--workers", "1", "--set", f"http.hosts={HOST}")
    with cluster(Place(root), *options, "--set", f"http.api_keys_file={keys}") as running:
        yield Site(running, gates, Authority.make(root / "certificates"))


@contextmanager
def connections(proxy: Proxy, site: Site, folder: Path) -> Iterator[Callable[[], httpx.Client]]:
    """The proxy runs; what makes a client of it that speaks HTTP/2."""
    servers = [site.running.url.removeprefix("http://")]
    context = ssl.create_default_context(cafile=str(site.authority.ca_file))
    with proxied(proxy, servers, site.authority, folder) as port:
        yield lambda: httpx.Client(
            base_url=f"https://127.0.0.1:{port}",
            http2=True,
            verify=context,
            trust_env=False,
            timeout=120,
            headers={"host": HOST},
        )


def ask(number: int) -> dict[str, Any]:
    """A request; its number, by which its gates are called, is its `max_tokens`."""
    messages = [{"role": "user", "content": "Say words."}]
    return {
        "json": {"messages": messages, "stream": True, "max_tokens": number},
        "headers": bearer(),
        "extensions": {"sni_hostname": HOST},
    }


every_proxy = pytest.mark.parametrize(
    "proxy",
    [
        pytest.param(each, id=each.name, marks=each.need.unless(each.need.is_command()))
        for each in PROXIES
    ],
)


@every_proxy
def test_a_proxy_passes_events_one_by_one_and_a_client_s_going(
    proxy: Proxy, site: Site, tmp_path: Path
) -> None:
    """Each word is let out once the one before it has come: a lump would wait for ever."""
    number = 100 * (1 + PROXIES.index(proxy))
    with connections(proxy, site, tmp_path) as connect, connect() as client:
        asked: dict[str, Any] = {"extensions": {"sni_hostname": HOST}}
        refused = client.get("/v1/models", **asked)
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/v1/models", headers=bearer(), **asked).status_code == 200
        assert client.get("/metrics", headers=bearer(), **asked).status_code == 404

        # The answer's head comes with its first word.
        site.open_gate(number, 0)
        with client.stream("POST", CHAT, **ask(number)) as answer:
            assert answer.status_code == 200
            assert answer.http_version == "HTTP/2"
            seen = []
            for line in answer.iter_lines():
                seen.append(line)
                for word in range(WORDS):
                    if f"word{word}" in line:
                        site.open_gate(number, word + 1)
        assert "data: [DONE]" in seen[-2:]

        site.open_gate(number + 1, 0)
        # Its connection ends, as that of a program that is killed: httpx resets no stream of HTTP/2.
        with connect() as leaving, leaving.stream("POST", CHAT, **ask(number + 1)) as answer:
            lines = answer.iter_lines()
            assert any("word0" in line for line in lines)
            wait_for(lambda: site.in_flight() == 1, 120, "a request")
            del lines
        wait_for(lambda: site.in_flight() == 0, 120, "the end of a request whose client has left")


@every_proxy
def test_a_request_waits_behind_a_proxy_until_a_worker_is_there_again(
    proxy: Proxy, site: Site, tmp_path: Path
) -> None:
    """The only worker is killed, and away for several checks of the proxy."""
    number = 100 * (1 + PROXIES.index(proxy)) + 50
    for word in range(WORDS):
        site.open_gate(number, word)

    def chat(client: httpx.Client) -> httpx.Response:
        with client.stream("POST", CHAT, **ask(number)) as answer:
            answer.read()
            return answer

    with connections(proxy, site, tmp_path) as connect, connect() as client:
        assert chat(client).status_code == 200
        (site.gates / "away").touch()
        try:
            [worker] = [pid for pid, line in site.running.children.items() if " worker " in line]
            os.kill(worker, signal.SIGKILL)
            health = f"{site.running.url}/health"
            wait_for(
                lambda: "ready" not in httpx.get(health, trust_env=False, timeout=120).text,
                120,
                "an outage",
            )
            time.sleep(CHECKS_S)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(chat, client)
                wait_for(
                    lambda: '"waiting":1' in httpx.get(health, trust_env=False, timeout=120).text,
                    120,
                    "a wait",
                )
                (site.gates / "away").unlink()
                answer = waiting.result(300)
        finally:
            (site.gates / "away").unlink(missing_ok=True)
    assert answer.status_code == 200, answer.text
    assert f"word{WORDS - 1}" in answer.text
