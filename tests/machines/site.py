"""A small cluster on two machines: servers and a frontend on one, workers on both, and a third machine between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import httpx
import trio
import yaml

from tests import needs
from tests.cluster.processes import until
from tests.cluster.test_disaggregation import PROMPTS, body
from tests.machines.between import Between, open_between
from tests.machines.machines import Machine, Running, open_machines
from tests.machines.page import merged
from tests.machines.servers import Servers, open_servers
from trinamo.cli.up.certs import write_secret

ETCD, NATS, HTTP, STATUS = 2379, 4222, 8080, 9091
TOKEN: Final = "a-token-of-nats"
WORKER: Final = "trinamo worker --config cluster.yaml"
CONFIG: Final = f"""
control_plane:
  embedded: false
  etcd: {{endpoints: ["etcd:{ETCD}"]}}
event_plane:
  embedded: false
  nats: {{servers: ["nats://nats:{NATS}"], token: {TOKEN}, allow_plain_password: true}}
data_plane:
  tcp: {{host: 0.0.0.0}}
security: {{secret_file: cluster.secret}}
worker: {{engine: exact, status_host: 0.0.0.0}}
http: {{host: 0.0.0.0, port: {HTTP}}}
"""


@attrs.define
class Site:
    """What runs on the machines, and what this process sees of it as one more machine."""

    one: Machine
    two: Machine
    between: Between
    here: str
    """This process's address."""
    servers: Servers
    client: httpx.AsyncClient
    workers: list[Running]
    frontend: Running

    async def ask(self, text: str, seed: int) -> httpx.Response:
        url = f"http://{self.one.address}:{HTTP}/v1/chat/completions"
        return await self.client.post(url, json=body(text, seed))

    async def answers(self) -> list[str]:
        """To all prompts; each must be given."""
        found = []
        for seed, text in enumerate(PROMPTS):
            response = await self.ask(text, seed)
            assert response.status_code == 200, response.text
            (choice,) = response.json()["choices"]
            found.append(str(choice["message"]["content"]))
        return found

    async def told(self, place: int | None, path: str) -> str:
        """What a page says of the worker of this number, or of the frontend."""
        if place is None:
            host, port = self.one.address, HTTP
        else:
            host, port = self.address(place), STATUS + place
        return (await self.client.get(f"http://{host}:{port}{path}")).text

    def address(self, place: int) -> str:
        machine = self.one if self.workers[place].log.parent == self.one.home else self.two
        return machine.address

    async def metric(self, place: int | None, name: str) -> float:
        """The sum of the samples of this name."""
        lines = (await self.told(place, "/metrics")).splitlines()
        heads = f"trinamo_{name}{{", f"trinamo_{name} "
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(heads))

    async def wait_live(self, count: int) -> None:
        """Until the frontend knows so many workers."""

        async def is_so() -> bool:
            return await self.metric(None, "live_instances") == count

        await until(is_so, f"{count} instances are live")

    async def wait_asked(self, place: int) -> None:
        """Until the worker of this number is asked once more."""
        before = await self.metric(place, "worker_requests_total")

        async def is_asked() -> bool:
            await self.ask(PROMPTS[0], 0)
            return await self.metric(place, "worker_requests_total") > before

        await until(is_asked, f"worker {place} is asked")


@asynccontextmanager
async def open_site(
    folder: Path,
    *,
    workers: Sequence[tuple[str, str]] = (("one", WORKER), ("two", WORKER)),
    **more: Any,
) -> AsyncIterator[Site]:
    """Start everything; leaving ends it. Skips the test where this user may make no networks.

    `workers` says of each its machine, and its line of a shell; `more` is configuration beside `CONFIG`.
    """
    if not needs.can_make_networks():
        needs.NETWORKS.lacking()
    config = merged(CONFIG, **more)
    with open_machines(folder, {"one": 1, "two": 1, "between": 1}, {}) as machines:
        one, two, third = machines.values()
        addresses = {"etcd": one.address, "nats": one.address}
        write_secret(folder / "cluster.secret")
        for machine in (one, two):
            with (machine.etc / "hosts").open("a") as file:
                file.writelines(f"{address} {name}\n" for name, address in addresses.items())
            (machine.home / "cluster.yaml").write_text(yaml.safe_dump(config))
            (machine.home / "cluster.secret").hardlink_to(folder / "cluster.secret")
        async with (
            open_between(third, one, two) as between,
            open_servers(one, addresses, config) as servers,
            httpx.AsyncClient(timeout=60, trust_env=False) as client,
        ):
            running = [
                machines[name].start(
                    f"worker{number}", f"{line} --set worker.status_port={STATUS + number}"
                )
                for number, (name, line) in enumerate(workers)
            ]
            frontend = one.start("frontend", "trinamo frontend --config cluster.yaml")
            here = f"{one.address.rpartition('.')[0]}.254"
            site = Site(one, two, between, here, servers, client, running, frontend)
            try:
                for each in running:
                    await each.ready(b"worker is ready")
                await frontend.ready(b"frontend is ready")
                await site.wait_live(sum("prefill" not in line for _, line in workers))
                yield site
            finally:
                with trio.CancelScope(shield=True):
                    for each in (frontend, *running):
                        await each.close()
