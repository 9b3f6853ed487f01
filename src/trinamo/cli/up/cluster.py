"""A whole cluster on one machine, from start to orderly end.

    one cancel scope for the cluster
    ├─ signals       the first drains, the second ends everything at once
    ├─ servers       embedded etcd and NATS, unless the configuration names others
    └─ children      N workers, one frontend or several (`cli/children/`)

The way out is the way in backwards: frontend, workers, servers, run file. What is shown is the
business of `display.py`, the figures in it of `watching.py`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import trio

from trinamo.runtime.config.config import Config
from trinamo.runtime.errors import ConfigError, TrinamoError, UnavailableError
from trinamo.runtime.http.transport import fetch_json
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.process.stopping import StopRequest
from trinamo.transports.assembly.planes import embedded_etcd, embedded_nats
from trinamo.transports.assembly.run_file import ProcessEntry, RunFile, find_runs, process_started
from trinamo.transports.openai.client import fetch
from trinamo.transports.servers.process import scratch_directory

from ..children.child import Child, end_all, wait_all_ready
from ..children.hangs import watch_for_hangs
from ..children.shared_port import (
    check_port,
    frontend_grace_s,
    reserved_port,
    sharing,
    status_url_of,
)
from ..failures import EXIT_HURRIED, EXIT_OK
from ..options import told_settings
from ..running.locating import reachable
from .certs import write_secret
from .display import Display
from .plan import StartPlan
from .watching import watch_cluster

if TYPE_CHECKING:
    from trinamo.transports.servers import EmbeddedServer


START_TIMEOUT_S: Final = 120.0
DISCOVERY_TIMEOUT_S: Final = 10.0
DISCOVERY_POLL_S: Final = 0.02
_SECTIONS: Final = ("control_plane.", "event_plane.", "security.", "data_plane.requests")
# Where an embedded server keeps its data, and was told to listen, is its owner's business alone.
_OWN: Final = (".data_dir", ".store_dir", ".port")


class LocalCluster:
    """Servers, workers and a frontend, as planned. It runs once."""

    def __init__(self, plan: StartPlan, display: Display) -> None:
        self.plan = plan
        self.servers: dict[str, EmbeddedServer] = {}
        self.workers: list[Child] = []
        self.frontends: list[Child] = []
        self._display = display
        self._stop = StopRequest()
        self._is_hurried = False
        self._run_file: RunFile | None = None
        self._sources = plan.sources
        self._config = plan.config
        """Of the children, before what is theirs alone."""

    @property
    def url(self) -> str:
        """Where the frontend answers; empty before it does."""
        return reachable(str(self.frontends[0].facts.get("url", ""))) if self.frontends else ""

    @property
    def children(self) -> list[Child]:
        """The processes started so far, the frontends last."""
        return [*self.workers, *self.frontends]

    async def run(self) -> int:
        """Start, serve until a signal, end in order; returns the exit code.

        Raises `ConfigError` or `UnavailableError` with a sentence if the start fails; nothing is
        left behind then, nor when cancelled.
        """
        find_runs()  # Sweeps what a killed cluster left behind.
        for host, port, advice in self.plan.ports:
            check_port(host, port, advice)
        with trio.open_signal_receiver(*ending_signals()) as signals:
            async with open_nursery() as nursery:
                nursery.start_soon(self._listen, signals)
                try:
                    with self._stop.everything:
                        await self._run_servers()
                finally:
                    if self._run_file is not None:
                        self._run_file.remove()
                nursery.cancel_scope.cancel()
        return EXIT_HURRIED if self._is_hurried else EXIT_OK

    async def _listen(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            name = signal.Signals(number).name
            if not self._stop.is_requested:
                self._display.say(f"{name}: draining; once more ends everything at once")
                self._stop.request()
                continue
            self._is_hurried = True
            self._display.say(f"{name} again: ending everything at once")
            self._stop.request()
            async with open_nursery() as nursery:
                for server in self.servers.values():
                    nursery.start_soon(server.kill)

    # --- servers ---

    async def _run_servers(self) -> None:
        async with open_nursery() as nursery:
            with self._stop.starting():
                await self._start_servers(nursery)
            if not self._stop.is_requested:
                with open_secret_file(self.plan) as secret_file:
                    # What the children are told, now that the servers have their addresses.
                    etcd, nats = self.servers.get("etcd"), self.servers.get("nats")
                    self._sources = self.plan.joined(
                        etcd="" if etcd is None else etcd.address,
                        nats="" if nats is None else nats.url,
                        nats_token="" if nats is None else nats.token,
                        secret_file=secret_file,
                    )
                    self._config = self._sources.load()
                    await self._run_children()
            if self.servers and not self._is_hurried:
                self._display.busy(f"stopping {' and '.join(self.servers)}")
            nursery.cancel_scope.cancel()

    async def _start_servers(self, nursery: trio.Nursery) -> None:
        config, opened = self.plan.config, {}
        if self.plan.has_etcd:
            opened["etcd"] = embedded_etcd(config.control_plane.etcd)
        if self.plan.has_nats:
            opened["nats"] = embedded_nats(config.event_plane.nats)
        if not opened:
            return
        self._display.busy(f"starting {' and '.join(opened)}")
        started_at = trio.current_time()

        async def hold(
            name: str,
            opening: AbstractAsyncContextManager[EmbeddedServer],
            *,
            task_status: trio.TaskStatus[None],
        ) -> None:
            async with opening as server:
                self.servers[name] = server
                task_status.started()
                await trio.sleep_forever()

        async with open_nursery() as starting:
            for name, server in opened.items():
                starting.start_soon(nursery.start, hold, name, server)
        took = trio.current_time() - started_at
        where = ", ".join(f"{name} on {s.address}" for name, s in self.servers.items())
        self._display.say(f"{where} ({took:.1f} s)")

    # --- children ---

    async def _run_children(self) -> None:
        with ExitStack() as held:
            async with open_nursery() as watching, open_nursery() as nursery:
                if self._display.is_live:
                    watching.start_soon(
                        watch_cluster, self.servers, lambda: self.children, self._display
                    )
                with self._stop.starting():
                    await self._start_children(nursery, held)
                if not self._stop.is_requested:
                    bound_s = self._config.worker.hang_timeout_s
                    watch = partial(watch_for_hangs, bound_s=bound_s)
                    watching.start_soon(watch, self.children, self._display.say)
                    await self._serve()
                await self._drain()
                watching.cancel_scope.cancel()

    async def _start_children(self, nursery: trio.Nursery, held: ExitStack) -> None:
        plan = self.plan
        environ = plan.child_environ(self._sources)
        for name, role in plan.worker_roles():
            self.workers.append(self._child(name, environ, "worker", "--role", role))
        self._plan_frontends(environ, held)
        self._publish("starting")
        frontends = _some_frontends(plan.frontends)
        self._display.busy(f"starting {_count(plan.workers, 'worker')} and {frontends}")
        started_at = trio.current_time()
        for child in self.children:
            nursery.start_soon(child.run, name=child.name)
        try:
            with trio.fail_after(START_TIMEOUT_S):
                await wait_all_ready(self.children)
        except trio.TooSlowError:
            late = ", ".join(child.name for child in self.children if not child.facts)
            raise UnavailableError(f"{late} did not start within {START_TIMEOUT_S:g} s") from None
        await self._wait_model()
        self._display.say(
            f"{_count(plan.workers, 'worker')} and {frontends} are ready"
            f" ({trio.current_time() - started_at:.1f} s)"
        )
        if len(self.frontends) == 1:
            # A frontend that is started again must be found where it was.
            self.frontends[0].environ["TRINAMO_HTTP__PORT"] = str(urlsplit(self.url).port)

    def _plan_frontends(self, environ: dict[str, str], held: ExitStack) -> None:
        """One, or several on one port, which stays theirs while `held` does."""
        if self.plan.frontends == 1:
            self.frontends = [self._child("frontend", environ, "frontend")]
            return
        http = self._config.http
        port = held.enter_context(reserved_port(http.host, http.port))
        environ = self.plan.child_environ(sharing(self._sources, port))
        for number in range(1, self.plan.frontends + 1):
            name = f"frontend-{number}"
            self.frontends.append(self._child(name, environ, "frontend", "--name", name))

    def _child(self, name: str, environ: dict[str, str], *arguments: str) -> Child:
        say, line = self._display.say, self._display.line
        return Child(name, arguments, environ, on_line=line, on_event=say)

    async def _wait_model(self) -> None:
        """Return once each frontend has heard of a model, so that the first request is answered."""
        with trio.move_on_after(DISCOVERY_TIMEOUT_S):
            for frontend in self.frontends:
                while True:
                    with suppress(TrinamoError):
                        told = await fetch_json(fetch, f"{status_url_of(frontend)}/health")
                        if told.get("status") == "ready":
                            break
                    await trio.sleep(DISCOVERY_POLL_S)

    async def _serve(self) -> None:
        """Tell that the cluster is ready, and wait for the first signal."""
        self._publish("ready")
        self._display.busy("")
        dashboard = reachable(str(self.frontends[0].facts.get("dashboard_url", "")))
        for line in welcome(self.url, dashboard, self.plan, self.servers):
            self._display.say(line)

        async def republish() -> None:
            """Keep the run file true while processes are started again."""
            while True:
                await trio.sleep(1)
                self._publish("ready")

        async with open_nursery() as nursery:
            nursery.start_soon(republish)
            await self._stop.wait()
            nursery.cancel_scope.cancel()

    async def _drain(self) -> None:
        config = self.plan.config
        self._publish("draining")
        if self.frontends:
            self._display.busy(f"draining {_some_frontends(len(self.frontends))}")
            await end_all(self.frontends, frontend_grace_s(config), self._display.say)
        if self.workers:
            self._display.busy(f"draining {_count(len(self.workers), 'worker')}")
            await end_all(self.workers, config.shutdown.whole_s, self._display.say)

    # --- the run file ---

    def _publish(self, state: str) -> None:
        plan, config = self.plan, self._config
        run = RunFile(
            pid=os.getpid(),
            started=process_started(os.getpid()) or 0,
            state=state,
            url=self.url,
            etcd=config.control_plane.etcd.endpoints,
            nats=config.event_plane.nats.servers,
            settings=shared_settings(config),
            engine=plan.engine,
            configured=plan.sources.defaults,
            processes=(
                *(ProcessEntry(name, server.pid) for name, server in self.servers.items()),
                *(
                    ProcessEntry(child.name, child.pid, status_url_of(child))
                    for child in self.children
                ),
            ),
            directories=(
                *(str(server.log_path.parent) for server in self.servers.values()),
                str(Path(config.security.secret_file or "").parent),
            ),
        )
        if run == self._run_file:
            return
        try:
            run.write()
        except OSError as error:
            self._display.say(
                f"cannot write {run.path}: {error.strerror}; `trinamo status` will not find this"
                " cluster by itself"
            )
        self._run_file = run


def ending_signals() -> set[signal.Signals]:
    """What drains the cluster: a terminal that goes, too, unless `nohup` says to outlive it."""
    found = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        found.remove(signal.SIGHUP)
    return found


def _some_frontends(number: int) -> str:
    return "the frontend" if number == 1 else f"{number} frontends"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def welcome(
    url: str, dashboard: str, plan: StartPlan, servers: Mapping[str, EmbeddedServer]
) -> Iterator[str]:
    """What to do with a cluster that is ready, line by line.

    Servers are named where the user gave them a port, for programs that are none of ours.
    """
    key, chat = "", "trinamo chat"
    if plan.config.http.needs_key:
        key, chat = ' -H "authorization: Bearer $KEY"', "trinamo chat --key-env KEY"
    body = '{"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}'
    yield f"The cluster is ready: {url}/v1"
    if dashboard:
        yield f"  dashboard: {dashboard}"
    yield f"  curl {url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'"
    yield f'  {chat} "Say hello."      trinamo status'
    yield f"  one more worker, in another terminal: {plan.worker_command}"
    if plan.config.control_plane.etcd.port:
        address = servers["etcd"].address
        yield f"  etcd, for every user of this machine: etcdctl --endpoints {address} get '' --prefix"
    if plan.config.event_plane.nats.port:
        nats = servers["nats"]
        yield f"  NATS, with its token: NATS_USER=$(cat {nats.token_path}) nats -s {nats.url} sub '>'"


# --- what makes a process one of the cluster ---


def shared_settings(config: Config) -> dict[str, str]:
    """By key, as text, what differs from the defaults in all that the processes of a cluster share.

    Children have it by environment. In the run file `trinamo worker` and `trinamo frontend` beside
    the cluster, `status`, `queue`, `config` and `doctor` find it.

    Passwords and tokens are revealed: it goes into the run file, which is for its user alone.
    """
    return {
        # Who finds it may be in another folder.
        key: str(Path(text).absolute()) if key.endswith("_file") else text
        for key, text in told_settings(config).items()
        if key.startswith(_SECTIONS) and not key.endswith(_OWN)
    }


@contextmanager
def open_secret_file(plan: StartPlan) -> Iterator[str]:
    """The cluster's secret: as configured, else one of its own that lasts as long as etcd's data.

    What is stored is signed with it. Where an embedded etcd keeps a folder it lies beside that, and is
    taken again; else it goes at the end.
    """
    folder = plan.config.control_plane.etcd.data_dir if plan.has_etcd else None
    if plan.config.security.secret_file is not None:
        yield plan.config.security.secret_file
    elif folder is not None:
        path = Path(f"{os.path.normpath(folder)}.secret").absolute()
        try:
            if not path.exists():
                write_secret(path)
        except OSError as error:
            raise ConfigError(
                f"cannot keep the cluster's secret in {path}: {error.strerror}; make the folder"
                " writable, or name a file by security.secret_file"
            ) from error
        yield str(path)
    else:
        with scratch_directory("trinamo-run-") as directory:
            path = directory / "secret"
            write_secret(path)
            yield str(path)
