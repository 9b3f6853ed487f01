"""nginx, HAProxy and Caddy as `docs/proxies.md` has them, run with the ports and files of a test."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import attrs

from tests.certificates import Authority
from tests.cli.places import wait_for
from tests.needs import CADDY, HAPROXY, NGINX, Need
from tests.shipped.test_docs import blocks
from tests.sources import ROOT
from trinamo.transports.servers.binaries import free_port

PAGE: Final = ROOT / "docs" / "proxies.md"
HOST: Final = "api.example.com"
_SERVER: Final = re.compile(r"\b127\.0\.0\.1:87\d7\b")


@attrs.frozen
class Proxy:
    """A program, the language of its block on the page, and what is around the block to run it here."""

    name: str
    need: Need
    frame: str
    command: Sequence[str]

    def write(self, folder: Path, servers: Sequence[str], port: int, more: str) -> None:
        """The page's own block, with the ports and the files of this test."""
        (block,) = blocks(PAGE, self.name)
        named = list(dict.fromkeys(_SERVER.findall(block)))
        assert named
        told = block.replace("/etc/ssl/", f"{folder}/")
        for number, name in enumerate(named):
            told = told.replace(name, servers[number % len(servers)])
        for ours in ("listen 443", "bind :443"):
            told = told.replace(ours, ours.replace(":", "").replace("443", f"127.0.0.1:{port}"))
        told = told.replace(f"{HOST} {{", f"{HOST}:{port} {{")
        (folder / "proxy.conf").write_text(
            self.frame.replace("BLOCK", told + more).replace("FOLDER", str(folder))
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


@contextmanager
def proxied(
    proxy: Proxy, servers: Sequence[str], authority: Authority, folder: Path, more: str = ""
) -> Iterator[int]:
    """The proxy runs before `servers`, given as `HOST:PORT`; its port, where it speaks TLS as `HOST`.

    `more` is what its configuration has besides the block of the page.
    """
    certificate, key = authority.sign(HOST, hosts=(HOST, "127.0.0.1"))
    for path in (certificate, key):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / f"{HOST}.both.pem").write_bytes(certificate.read_bytes() + key.read_bytes())
    port = free_port()
    proxy.write(folder, servers, port, more)
    with (folder / "log").open("wb") as log:
        environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(folder)}
        process = subprocess.Popen(proxy.lines(folder), env=environ, stdout=log, stderr=log)
    try:
        wait_for(lambda: _listens(port) or process.poll() is not None, 120, "the proxy's start")
        assert process.poll() is None, (folder / "log").read_text()
        yield port
    finally:
        process.terminate()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as some:
        return some.connect_ex(("127.0.0.1", port)) == 0
