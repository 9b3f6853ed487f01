"""Two machines started from `docs/operations.md` word for word, and what an operator does with them.

The page's own file and commands, on network namespaces: a secret, an etcd and a NATS cluster on a third
machine, a worker and a frontend on each of two, TLS and keys towards clients.
"""

from __future__ import annotations

import json
import shlex
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import trio
import yaml

from tests import needs
from tests.certificates import Authority
from tests.cluster.processes import until
from tests.machines.clients import Clients, open_clients
from tests.machines.machines import Machine, Running, open_machines, sniffed
from tests.machines.page import merged, section
from tests.machines.servers import Servers, names_of, open_servers
from tests.sim.report.browser import CHROMIUM, Browser, browser

pytestmark = [
    needs.OPENSSL.unless(shutil.which("openssl") is not None),
    needs.CHROMIUM.unless(CHROMIUM is not None),
    # httpx leaves generators of its own to the garbage collector when a stream is left.
    pytest.mark.filterwarnings("ignore:.*(httpx|httpcore|Response.aiter).*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

KEY = "sk-a-key-of-one-client"
OPERATORS_KEY = "sk-the-key-of-an-operator"
MANY = section("Many machines")
TLS = section("TLS towards clients")
KEYS = section("Keys, rates, pages and request ids")
UNHEARD = "Rhabarberbarbara"
"""A word of prompts that nobody between is to read."""
TLS_DATA = b"\x17\x03\x03"
STATUS = MANY.command("trinamo status")
DOCTOR = "trinamo doctor --config cluster.yaml"


@attrs.define
class Site:
    """Two machines and what runs on them."""

    config: dict[str, Any]
    machines: list[Machine]
    servers: Servers
    workers: list[Running]
    frontends: list[Running]
    clients: Clients
    chromium: Browser

    def status_url(self, number: int) -> str:
        """The status port of a frontend, as the page names it."""
        return f"http://{self.machines[number].address}:{self.config['http']['status_port']}"

    async def status(self, machine: Machine, more: str = "", **codes: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await machine.run(f"{STATUS} --json {more}", **codes))
        return found

    async def page(self, number: int, expression: str) -> Any:
        """What JavaScript says of the page that a frontend shows now."""
        return await trio.to_thread.run_sync(self.chromium.evaluate, expression)

    async def open_page(self, number: int) -> None:
        url = f"{self.status_url(number)}/dashboard"
        await trio.to_thread.run_sync(self.chromium.open, url)


def start_worker(machine: Machine, name: str = "worker") -> Running:
    return machine.start(name, MANY.command("trinamo worker"))


def start_frontend(machine: Machine, name: str = "frontend") -> Running:
    return machine.start(name, MANY.command("trinamo frontend"))


@asynccontextmanager
async def open_site(folder: Path) -> AsyncIterator[Site]:
    """Follow the page."""
    keys_file = shlex.split(KEYS.command("trinamo frontend --api-keys-file"))[3]
    # Longer than a balancer takes to look at both, also where each look lasts some seconds.
    more = {"api_keys_file": keys_file, "lame_duck_s": 30}
    config = merged(*MANY.files, *TLS.files, http=more)
    places = names_of(config)
    # What the page leaves open: which engine, and where a client's certificates are.
    environ = {
        "TRINAMO_WORKER__ENGINE": "exact",
        "SSL_CERT_FILE": str(folder / "authority" / "ca.pem"),
        "KEY": KEY,
        "OPERATORS_KEY": OPERATORS_KEY,
    }
    wanted = {"one": 1, "two": 1, "servers": len(places)}
    with open_machines(folder, wanted, environ) as machines, browser() as chromium:
        one, two, third = machines["one"], machines["two"], machines["servers"]
        addresses = dict(zip([host for host, _ in places], third.addresses, strict=True))
        secret = await _prepared([one, two], config, addresses, folder)
        assert secret
        async with (
            open_servers(third, addresses, config) as servers,
            _processes([one, two]) as all_,
        ):
            urls = [f"https://{each.address}:{config['http']['port']}" for each in (one, two)]
            ca_file = folder / "authority" / "ca.pem"
            async with open_clients(urls, ca_file=ca_file, key=KEY) as clients:
                yield Site(config, [one, two], servers, *all_, clients, chromium)


async def _prepared(
    machines: list[Machine], config: dict[str, Any], addresses: dict[str, str], folder: Path
) -> str:
    """Everything that the page has an operator put on each machine."""
    authority = Authority.make(folder / "authority")
    names = [*config["http"]["hosts"], *(each.name for each in machines)]
    hosts = (*names, *(each.address for each in machines))
    certificate, key = authority.sign("tls", hosts=hosts)
    one = machines[0]
    await one.run(MANY.command("trinamo certs secret"))
    secret = (one.home / config["security"]["secret_file"]).read_text()
    for machine in machines:
        with (machine.etc / "hosts").open("a") as file:
            file.writelines(f"{address} {name}\n" for name, address in addresses.items())
            file.writelines(f"{machine.address} {name}\n" for name in config["http"]["hosts"])
        files = {
            machine.home / "cluster.yaml": yaml.safe_dump(config),
            machine.home / config["security"]["secret_file"]: secret,
            _in(
                machine, config["http"]["api_keys_file"]
            ): f"alice: {KEY}\nbob (operator): {OPERATORS_KEY}\n",
            _in(machine, config["http"]["tls"]["certificate_file"]): certificate.read_text(),
            _in(machine, config["http"]["tls"]["key_file"]): key.read_text(),
        }
        for path, text in files.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o600)
    return str(secret)


def _in(machine: Machine, path: str) -> Path:
    """A file below `/etc` of a machine, as this process sees it."""
    return machine.etc / Path(path).relative_to("/etc")


@asynccontextmanager
async def _processes(
    machines: list[Machine],
) -> AsyncIterator[tuple[list[Running], list[Running]]]:
    """A worker and a frontend on each; the lists may be changed, and all in them end at the end."""
    workers = [start_worker(each) for each in machines]
    frontends = [start_frontend(each) for each in machines]
    try:
        for each in workers:
            await each.ready(b"worker is ready")
        for each in frontends:
            await each.ready(b"frontend is ready")
        yield workers, frontends
    finally:
        with trio.CancelScope(shield=True):
            for each in (*frontends, *workers):
                await each.close()


async def test_two_machines_from_the_page_serve_and_are_seen_through_restarts_and_an_outage(
    tmp_path: Path,
) -> None:
    if not needs.can_make_networks():
        needs.NETWORKS.lacking()
    async with open_site(tmp_path) as site:
        await both_frontends_answer(site)
        for machine in site.machines:
            await until(partial(sees_all_of_it, site, machine), f"{machine.name} sees all of it")
        await who_listens_on_the_cable_reads_no_prompt_and_no_answer(site)
        await scraping_reaches_everybody(site)
        await a_page_shows_both_machines(site)
        async with trio.open_nursery() as load:
            load.start_soon(site.clients.run)
            await site.clients.wait_more(5)
            await restart_everything_in_turn(site)
            await kill_a_worker(site)
            await stop_etcd_for_a_while(site)
            load.cancel_scope.cancel()
        assert site.clients.bad == []


async def both_frontends_answer(site: Site) -> None:
    """A chat over TLS with a key, by the official way and by ours; without a key it is a 401."""
    clients = site.clients
    for url in clients.urls:

        async def has_model(url: str = url) -> bool:
            listed = (await clients.client.get(f"{url}/v1/models")).json()
            return [each["id"] for each in listed["data"]] == ["exact"]

        await until(has_model, f"{url} knows the model")
    await clients.learn()
    bare = await clients.client.get(f"{clients.urls[0]}/v1/models", headers={"authorization": "-"})
    assert bare.status_code == 401
    host, port = site.config["http"]["hosts"][0], site.config["http"]["port"]
    for machine in site.machines:
        line = f"trinamo chat --url https://{host}:{port} --key-env KEY --max-tokens 5 hello"
        assert (await machine.run(line)).strip()


async def sees_all_of_it(site: Site, machine: Machine) -> bool:
    """`status`, `doctor` and `trace` on a machine: two workers, two frontends, none away."""
    try:
        await machine.run(STATUS)
        status = await site.status(machine)
        await machine.run(DOCTOR)
        # Of either frontend's requests, with its own legs and those of the worker.
        lines = [
            f"trinamo trace learn-{number} --config cluster.yaml --json" for number in range(2)
        ]
        told = [json.loads(await machine.run(line))["found"] for line in lines]
    except AssertionError as error:
        # A process that did not answer in time: the command's status is not 0.
        print(error)
        return False
    legs = [{leg["name"] for each in found for leg in each["trace"]["legs"]} for found in told]
    return (
        (len(status["instances"]), len(status["frontends"])) == (2, 2)
        and not status.get("away")
        and all({"http", "attempt", "worker", "engine"} <= each for each in legs)
    )


async def who_listens_on_the_cable_reads_no_prompt_and_no_answer(site: Site) -> None:
    """Each frontend asks each worker, one of them over the cable, and the clients ask over it too."""
    body = {
        "model": "exact",
        "max_tokens": 40,
        "temperature": 0,
        "messages": [{"role": "user", "content": f"{UNHEARD} {UNHEARD}"}],
    }
    answers = set()
    async with sniffed() as frames:
        for url in 4 * site.clients.urls:
            said = await site.clients.client.post(f"{url}/v1/chat/completions", json=body)
            answers.add(said.json()["choices"][0]["message"]["content"])
    ends = [socket.inet_aton(each.address) for each in site.machines]
    between = [each for each in frames if all(end in each[26:34] for end in ends)]
    assert any(TLS_DATA in each for each in between)
    (answer,) = answers
    for word in (UNHEARD, answer):
        assert word
        assert not [each for each in frames if word.encode() in each]


async def scraping_reaches_everybody(site: Site) -> None:
    """Every target of `/sd`, asked from another machine than its own, and none twice."""
    async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
        for number in range(2):
            groups = (await client.get(f"{site.status_url(number)}/sd")).json()
            targets = [target for group in groups for target in group["targets"]]
            assert len(targets) == len(set(targets)) == 4, targets
            for target in targets:
                response = await client.get(f"http://{target}/metrics")
                assert response.status_code == 200
                assert "trinamo_build_info" in response.text


async def a_page_shows_both_machines(site: Site) -> None:
    """In a browser: two workers, two frontends, and that all answer."""
    for number in range(2):
        await site.open_page(number)

        async def is_whole(number: int = number) -> bool:
            rows = "document.querySelectorAll('#instances tbody tr').length"
            nodes = "document.querySelectorAll('#topology .node.{}').length"
            health = "document.querySelector('#health').innerText"
            seen = [
                await site.page(number, rows),
                await site.page(number, nodes.format("worker")),
                await site.page(number, nodes.format("frontend")),
                await site.page(number, health),
            ]
            return seen == [2, 2, 2, "● all answer"]

        await until(is_whole, f"the page of frontend {number} shows everybody")
    assert site.chromium.errors == []


async def restart_everything_in_turn(site: Site) -> None:
    """As `docs/rollouts.md` says: a new worker, then SIGTERM to the old; frontends one by one."""
    for number, machine in enumerate(site.machines):
        new = start_worker(machine, "worker-again")
        site.workers.append(new)
        await new.ready(b"worker is ready")
        await site.workers[number].end()
        await site.clients.wait_more(4)
    for number, machine in enumerate(site.machines):
        await site.frontends[number].end()
        new = start_frontend(machine, "frontend-again")
        site.frontends.append(new)
        await new.ready(b"frontend is ready")
        await until(lambda number=number: _serves(site, number), "it is served by again")
        await site.clients.wait_more(4)
    assert site.clients.bad == []


async def _serves(site: Site, number: int) -> bool:
    return site.clients.urls[number] in site.clients.balancer.serving


async def kill_a_worker(site: Site) -> None:
    """Its answers go on elsewhere; once another is there, the views have forgotten it."""
    await site.workers[-1].kill()
    await site.clients.wait_more(10)
    new = start_worker(site.machines[1], "worker-after")
    site.workers.append(new)
    await new.ready(b"worker is ready")

    async def is_forgotten() -> bool:
        status = await site.status(site.machines[0], codes=(0, 3))
        return len(status["instances"]) == 2 and not status.get("away")

    await until(is_forgotten, "status shows the two that live", timeout_s=300)
    assert site.clients.bad == []


async def stop_etcd_for_a_while(site: Site) -> None:
    """Requests go on, and the views show the workers that live, not those of some time ago."""
    await site.servers.stop_etcd()
    await site.clients.wait_more(10)
    # While etcd is away nobody says where the frontends are, so one is named.
    named = f"--url {site.clients.urls[0]} --key-env OPERATORS_KEY"

    async def names_the_living() -> bool:
        status = await site.status(site.machines[1], named, codes=(3,))
        return len(status["instances"]) == 2

    await until(names_the_living, "status names the two that live")
    await site.open_page(0)

    async def shows_the_living() -> bool:
        rows = "document.querySelectorAll('#instances tbody tr').length"
        nodes = "document.querySelectorAll('#topology .node.worker').length"
        return [await site.page(0, rows), await site.page(0, nodes)] == [2, 2]

    await until(shows_the_living, "the page shows the two that live")
    await site.servers.start_etcd()

    async def is_well() -> bool:
        found = await site.status(site.machines[1], codes=(0, 3))
        return len(found["instances"]) == 2 and not found.get("away")

    await until(is_well, "status is whole again", timeout_s=300)
    await site.clients.wait_more(5)
    assert site.clients.bad == []
