"""A whole cluster of real processes for one test: etcd, NATS, workers, a frontend."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
import trio

from tests.processes.proxy import Proxy, open_proxy
from trinamo.transports.servers import EmbeddedServer, open_etcd_server, open_nats_server

ROLE = Path(__file__).with_name("role.py")
START_TIMEOUT_S = STOP_TIMEOUT_S = 300.0
# The product's bounds are a few seconds, which a process of a loaded machine may miss.
PATIENT: Mapping[str, Any] = {
    "control_plane.etcd.connect_timeout_s": 60,
    "control_plane.etcd.request_timeout_s": 60,
    "event_plane.nats.start_timeout_s": 60,
    "data_plane.tcp.connect_timeout_s": 60,
    "data_plane.tcp.ack_timeout_s": 60,
}


@attrs.define
class Member:
    """One process and what it said when it was ready."""

    process: trio.Process
    facts: dict[str, Any]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """As hard as it gets: SIGKILL."""
        self.process.kill()

    def freeze(self) -> None:
        """SIGSTOP: its connections stay, and nobody answers on them."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def stop(self) -> int:
        """SIGTERM, and the exit code."""
        if self.is_running:
            self.process.send_signal(signal.SIGTERM)
        with trio.fail_after(STOP_TIMEOUT_S):
            return await self.process.wait()

    def fd_count(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


@attrs.define
class Cluster:
    """Everything a test may want to hurt."""

    etcd: EmbeddedServer
    nats: EmbeddedServer
    workers: list[Member]
    frontend: Member
    client: httpx.AsyncClient
    links: dict[str, Proxy]
    """Between every process and `etcd` and `nats`, if the cluster was opened `linked`."""
    start_worker: Callable[..., Awaitable[Member]]
    """One more, as the others are; its role and settings of its own may be given."""
    places: Mapping[str, Any]
    """The settings that tell where etcd and NATS are."""

    @property
    def url(self) -> str:
        return str(self.frontend.facts["url"])

    async def metric(self, url: str, name: str, **labels: str) -> float:
        """The sum of the samples of `trinamo_<name>` that carry these labels."""
        text = (await self.client.get(f"{url}/metrics")).text
        total = 0.0
        for line in text.splitlines():
            if not line.startswith((f"trinamo_{name}{{", f"trinamo_{name} ")):
                continue
            if all(f'{key}="{value}"' in line for key, value in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    async def wait_models(self, count: int = 1) -> None:
        await until(lambda: self._has_models(count), "the models appear")

    async def _has_models(self, count: int) -> bool:
        response = await self.client.get(f"{self.url}/v1/models")
        return len(response.json()["data"]) >= count

    async def wait_live(self, count: int) -> None:
        """Until the frontend's live set has exactly `count` instances."""

        async def is_reached() -> bool:
            return await self.metric(self.url, "live_instances") == count

        await until(is_reached, f"{count} instances are live")


async def until(is_true: Any, what: str, *, timeout_s: float = 300.0) -> None:
    """Poll a condition of other processes, which no event of ours can announce."""
    with trio.move_on_after(timeout_s):
        while not await is_true():
            await trio.sleep(0.1)
        return
    raise AssertionError(f"within {timeout_s:g} s it did not happen that {what}")


async def start(
    role: str,
    settings: dict[str, Any],
    log: Path,
    *,
    launcher: Sequence[str] = (),
    script: Path = ROLE,
) -> Member:
    """Start one process of `script`; `launcher` is a command that runs the one it is given."""
    arguments = [str(script), role, *(f"{k}={v}" for k, v in settings.items())]
    environ = {**os.environ, "PYTHONWARNINGS": ""}
    with log.open("wb") as stderr:
        process = await trio.lowlevel.open_process(
            [*launcher, sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environ,
        )
    assert process.stdout is not None
    line = b""
    try:
        with trio.move_on_after(START_TIMEOUT_S):
            while not line.endswith(b"\n"):
                piece = await process.stdout.receive_some(4096)
                if not piece:
                    break
                line += piece
    finally:
        # Also when another one that starts beside it has failed.
        if not line.endswith(b"\n"):
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
                await process.stdout.aclose()
    if not line.endswith(b"\n"):
        raise AssertionError(f"{role} did not start; its log is {log}")
    return Member(process, json.loads(line), log)


@asynccontextmanager
async def open_cluster(
    directory: Path,
    *,
    workers: int = 2,
    roles: Sequence[str] = (),
    engine: str = "echo",
    settings: dict[str, Any] | None = None,
    linked: bool = False,
    key: str = "",
    etcd_bytes: int | None = None,
    stores: Mapping[str, Path] | None = None,
    launchers: Mapping[str, Sequence[str]] | None = None,
) -> AsyncIterator[Cluster]:
    """Start a cluster; leaving ends every process of it, by force if it must.

    `roles` are those of the workers, one each, instead of so many that do all. If `linked`, the
    processes reach etcd and NATS through links that can be cut. `key` is an operator's, where the
    `settings` ask for keys. `etcd_bytes` bounds etcd's database, and
    `stores` says where `etcd` or `nats` keeps its data, if not in a place of its own. `launchers` are the
    commands that run the processes of a role, `frontend` among them, if not this one.
    """
    roles = roles or ["aggregated"] * workers
    async with AsyncExitStack() as stack:
        etcd = await stack.enter_async_context(
            open_etcd_server((stores or {}).get("etcd"), memory_bytes=etcd_bytes)
        )
        nats = await stack.enter_async_context(open_nats_server((stores or {}).get("nats")))
        links = {
            server.name: await stack.enter_async_context(open_proxy(server.address))
            for server in (etcd, nats)
            if linked
        }
        places = {
            "control_plane.etcd.endpoints": links["etcd"].address if linked else etcd.endpoint,
            "event_plane.nats.servers": (f"nats://{links['nats'].address}" if linked else nats.url),
            "event_plane.nats.token": nats.token,
        }
        common = {
            # Another build may not know all of them.
            **({} if launchers else PATIENT),
            **places,
            "worker.engine": engine,
            "http.port": 0,
            **(settings or {}),
        }
        launchers = launchers or {}
        members: list[Member] = []
        stack.push_async_callback(_end, members)
        await _start_all(members, common, directory, roles, launchers)
        *served, frontend = members
        client = await stack.enter_async_context(
            httpx.AsyncClient(
                timeout=None,
                limits=httpx.Limits(max_keepalive_connections=8),
                headers={"authorization": f"Bearer {key}"} if key else {},
            )
        )

        async def start_worker(
            role: str = "aggregated", own: Mapping[str, Any] | None = None
        ) -> Member:
            settings = {**common, "worker.role": role, **(own or {})}
            log = directory / f"worker{len(members)}.log"
            member = await start("worker", settings, log, launcher=launchers.get(role, ()))
            members.append(member)
            return member

        cluster = Cluster(etcd, nats, served, frontend, client, links, start_worker, places)
        answering = len([role for role in roles if role != "prefill"])
        if answering:
            await cluster.wait_models()
            await cluster.wait_live(answering)
        yield cluster


async def _start_all(
    members: list[Member],
    settings: dict[str, Any],
    directory: Path,
    roles: Sequence[str],
    launchers: Mapping[str, Sequence[str]],
) -> None:
    """Start everything together: the workers, and as the last of `members` the frontend."""
    names = {f"worker{number}": role for number, role in enumerate(roles)} | {"frontend": ""}
    started: dict[str, Member] = {}

    async def start_one(name: str, role: str) -> None:
        own = {**settings, "worker.role": role} if role else settings
        kind, log = name.rstrip("0123456789"), directory / f"{name}.log"
        started[name] = await start(kind, own, log, launcher=launchers.get(role or kind, ()))

    try:
        async with trio.open_nursery() as nursery:
            for name, role in names.items():
                nursery.start_soon(start_one, name, role)
    finally:
        members += [started[name] for name in names if name in started]


async def _end(members: list[Member]) -> None:
    for member in reversed(members):
        if member.is_running:
            member.process.send_signal(signal.SIGTERM)
            member.thaw()
    with trio.move_on_after(STOP_TIMEOUT_S):
        for member in members:
            await member.process.wait()
    for member in members:
        if member.is_running:
            member.kill()
            await member.process.wait()
        assert member.process.stdout is not None
        await member.process.stdout.aclose()


def chat(text: str, *, stream: bool = False, **more: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"messages": [{"role": "user", "content": text}], "stream": stream, **more}
