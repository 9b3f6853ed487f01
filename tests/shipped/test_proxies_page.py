"""nginx, HAProxy and Caddy as their page has them, before a frontend whose engine says a word when told to."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import httpx
import pytest

from tests.certificates import Authority
from tests.cli.places import Place, RunningCluster, cluster, wait_for
from tests.session.needs import CADDY, HAPROXY, NGINX, Need
from tests.shipped.test_docs import blocks
from tests.sources import ROOT

pytestmark = [pytest.mark.others, pytest.mark.slow, pytest.mark.services]

PAGE: Final = ROOT / "docs" / "proxies.md"
HOST: Final = "api.example.com"
KEY: Final = "a-key-of-some-length"
WORDS: Final = 5
CHAT: Final = "/v1/chat/completions"
ENGINE: Final = """
import trio
from pathlib import Path

async def engine(request, context):
    for number in range({words}):
        while not Path({gates!r}, f"{{request.max_tokens}}-{{number}}").exists():
            await trio.sleep(0.01)
        yield f"word{{number}} "
"""


@attrs.frozen
class Proxy:
    """A program, the language of its block on the page, and what is around the block to run it here."""

    name: str
    need: Need
    frame: str
    command: Sequence[str]

    def write(self, folder: Path, server: str, port: int) -> None:
        """The page's own block, with the ports and the files of this test."""
        (block,) = blocks(PAGE, self.name)
        assert block.count("127.0.0.1:8787") == 1
        told = block.replace("127.0.0.1:8787", server).replace("/etc/ssl/", f"{folder}/")
        for ours in ("listen 443", "bind :443"):
            told = told.replace(ours, ours.replace(":", "").replace("443", f"127.0.0.1:{port}"))
        told = told.replace(f"{HOST} {{", f"{HOST}:{port} {{")
        (folder / "proxy.conf").write_text(
            self.frame.replace("BLOCK", told).replace("FOLDER", str(folder))
        )

    def lines(self, folder: Path) -> list[str]:
        return [each.replace("FOLDER", str(folder)) for each in self.command]


PROXIES: Final = (
    Proxy(
        "nginx",
        NGINX,
        "daemon off;\nuser root;\npid FOLDER/pid;\nevents {}\nhttp {\naccess_log off;\n"
        "client_body_temp_path FOLDER/body;\nproxy_temp_path FOLDER/proxy;\nfastcgi_temp_path FOLDER/f;\n"
        "uwsgi_temp_path FOLDER/u;\nscgi_temp_path FOLDER/s;\nBLOCK}\n",
        ("nginx", "-p", "FOLDER", "-e", "stderr", "-c", "FOLDER/proxy.conf"),
    ),
    Proxy("haproxy", HAPROXY, "BLOCK", ("haproxy", "-db", "-f", "FOLDER/proxy.conf")),
    Proxy(
        "caddyfile",
        CADDY,
        "{\nadmin off\nauto_https disable_redirects\nskip_install_trust\n}\nBLOCK",
        ("caddy", "run", "--adapter", "caddyfile", "--config", "FOLDER/proxy.conf"),
    ),
)


@attrs.frozen
class Site:
    """A frontend whose engine waits for a gate before each word, and the certificate of its proxy."""

    running: RunningCluster
    gates: Path
    authority: Authority

    def open_gate(self, request: int, number: int) -> None:
        (self.gates / f"{request}-{number}").touch()

    def in_flight(self) -> float:
        """Requests that the frontend has, as it says."""
        text = httpx.get(f"{self.running.url}/metrics", headers=bearer(), trust_env=False).text
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
    options = ("--engine", "./mine.py:engine", "--set", f"http.hosts={HOST}")
    with cluster(Place(root), *options, "--set", f"http.api_keys_file={keys}") as running:
        yield Site(running, gates, Authority.make(root / "certificates"))


@contextmanager
def proxied(proxy: Proxy, site: Site, folder: Path) -> Iterator[Callable[[], httpx.Client]]:
    """The proxy runs; what makes a client of it that speaks HTTP/2."""
    certificate, key = site.authority.sign(HOST, hosts=(HOST,))
    for path in (certificate, key):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / f"{HOST}.both.pem").write_bytes(certificate.read_bytes() + key.read_bytes())
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        port = some.getsockname()[1]
    proxy.write(folder, site.running.url.removeprefix("http://"), port)
    with (folder / "log").open("wb") as log:
        environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(folder)}
        process = subprocess.Popen(proxy.lines(folder), env=environ, stdout=log, stderr=log)
    try:
        wait_for(lambda: listens(port) or process.poll() is not None, 30, "the proxy's start")
        assert process.poll() is None, (folder / "log").read_text()
        context = ssl.create_default_context(cafile=str(site.authority.ca_file))
        yield lambda: httpx.Client(
            base_url=f"https://127.0.0.1:{port}",
            http2=True,
            verify=context,
            trust_env=False,
            timeout=30,
            headers={"host": HOST},
        )
    finally:
        process.terminate()
        process.wait()


def listens(port: int) -> bool:
    with socket.socket() as some:
        return some.connect_ex(("127.0.0.1", port)) == 0


def ask(number: int) -> dict[str, Any]:
    """A request; its number, by which its gates are called, is its `max_tokens`."""
    messages = [{"role": "user", "content": "Say words."}]
    return {
        "json": {"messages": messages, "stream": True, "max_tokens": number},
        "headers": bearer(),
        "extensions": {"sni_hostname": HOST},
    }


@pytest.mark.parametrize(
    "proxy",
    [
        pytest.param(each, id=each.name, marks=each.need.unless(each.need.is_command()))
        for each in PROXIES
    ],
)
def test_a_proxy_passes_events_one_by_one_and_a_client_s_going(
    proxy: Proxy, site: Site, tmp_path: Path
) -> None:
    """Each word is let out once the one before it has come: a lump would wait for ever."""
    number = 100 * (1 + PROXIES.index(proxy))
    with proxied(proxy, site, tmp_path) as connect, connect() as client:
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
            wait_for(lambda: site.in_flight() == 1, 30, "a request")
            del lines
        wait_for(lambda: site.in_flight() == 0, 30, "the end of a request whose client has left")
