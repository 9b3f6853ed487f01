"""A whole cluster in one world: frontends, workers, store, broker and clients, all real code.

Hosts are called `store`, `broker`, `frontend0`…, `prefill0`…, `worker0`…, and `client0`… in the order of
the load. Each is a process of the world with its own `Env`, so it can be killed, paused, restarted and
cut off like any other; after a restart it is a new process with a new identity.

What this module does not do: decide what happens to it (`scenario/`) or judge it (`checks/`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any

import attrs
import msgspec
import trio

from trinamo.runtime.config.config import Config
from trinamo.runtime.engines.mocker.engine import MockerOptions

from ..core.host import HostState
from ..core.world import World
from ..env import SimEnv
from ..errors import Violation
from ..net.network import Network
from .members import ask_as_member
from .memory import ClusterMemory, MemoryPlan
from .planes import SimTransports
from .roles import Process, run_frontend, run_worker
from .services import BROKER, STORE, NetworkServices, NotedStore
from .workload import ClientProfile, ClientRecord, ask_over_http


@attrs.frozen(kw_only=True)
class ClusterPlan:
    """How many of what, and how it is configured."""

    frontends: int = 1
    workers: int = 2
    prefills: int = 0
    """Workers that prefill for the others, which decode then; how is `disaggregation.mode` of `config`."""
    memory: MemoryPlan = attrs.Factory(MemoryPlan)
    """How blocks move between workers, if there are prefill workers."""
    workload: tuple[ClientProfile, ...] = (ClientProfile(),)
    config: Config = attrs.Factory(Config)
    engine: MockerOptions = attrs.Factory(MockerOptions)
    ready_timeout_s: float = 10.0

    @property
    def clients(self) -> list[ClientProfile]:
        """What each client host does, in the order of their numbers."""
        return [profile for profile in self.workload for _ in range(profile.clients)]

    def names(self, kind: str) -> list[str]:
        """The hosts of a kind: `frontend`, `prefill`, `worker` or `client`."""
        counts = {"frontend": self.frontends, "prefill": self.prefills, "worker": self.workers}
        return [f"{kind}{number}" for number in range(counts.get(kind, len(self.clients)))]

    @property
    def host_names(self) -> list[str]:
        """Every host of a cluster of this plan."""
        kinds = ("frontend", "prefill", "worker", "client")
        return [STORE, BROKER, *(name for kind in kinds for name in self.names(kind))]


class Cluster:
    """The hosts of one run. Make it before `world.run`, then `await start()` inside it."""

    def __init__(
        self,
        world: World,
        network: Network,
        plan: ClusterPlan,
        *,
        services: NetworkServices | None = None,
    ) -> None:
        self.world, self.network, self.plan = world, network, plan
        self.services = NetworkServices(world, network) if services is None else services
        """Store and broker; on the simulated network if nothing else is given."""
        self.processes: dict[str, Process] = {}
        """The present life of every frontend, worker and caller host."""
        self.records: list[ClientRecord] = []
        """Every request asked, in order."""
        self.frontends, self.prefills = plan.names("frontend"), plan.names("prefill")
        self.workers, self.clients = plan.names("worker"), plan.names("client")
        self.memory = ClusterMemory(world, network, plan.memory)
        self._profiles = dict(zip(self.clients, plan.clients, strict=True))

    @property
    def store(self) -> NotedStore:
        """What the store holds."""
        return self.services.store

    @property
    def hosts(self) -> list[str]:
        """The names of all hosts."""
        return self.plan.host_names

    @property
    def servers(self) -> list[str]:
        """The hosts with an engine: those that prefill, then those that answer."""
        return [*self.prefills, *self.workers]

    async def start(self) -> None:
        """Boot everything but the clients; returns once every frontend knows every worker.

        Raises `Violation` if that takes longer than `ready_timeout_s`.
        """
        for name in (STORE, BROKER, *self.servers, *self.frontends):
            self.boot(name)
        timeout_s = self.plan.ready_timeout_s
        with trio.move_on_after(timeout_s):
            for name in (*self.servers, *self.frontends):
                await self.processes[name].ready.wait()
            while not all(map(self._knows_workers, self.frontends)):  # noqa: ASYNC110
                await trio.sleep(0.05)
            return
        for name in (*self.servers, *self.frontends):
            if not self.processes[name].ready.is_set():
                raise Violation("I15", f"{name} is not ready after {timeout_s:g} s")
        raise Violation("I13", f"a frontend does not know all workers after {timeout_s:g} s")

    def _knows_workers(self, frontend: str) -> bool:
        service = self.processes[frontend].service
        views = self.processes[frontend].transports.control
        assert service is not None
        assert views is not None
        instances = [v for v in views.views if v.prefix.startswith("instances/")]
        return any(len(view.known) == len(self.workers) for view in instances)

    def start_clients(self) -> None:
        """Boot the clients, which begin to ask at once."""
        for name in self.clients:
            self.boot(name)

    def boot(self, name: str) -> None:
        """Start the process of host `name`, a new one if it had one before."""
        if name in (STORE, BROKER):
            self.services.boot(name)
        else:
            self.world.boot(name, *self._main(name))

    def _main(self, name: str) -> tuple[Callable[..., Awaitable[object]], *tuple[Any, ...]]:
        generation = self.world.host(name).generation + 1
        env = SimEnv(self.world, f"{name}.{generation}")
        process = Process(name, env, SimTransports(name, self.services, self.memory))
        self.processes[name] = process
        config = self.plan.config
        if name in self.servers:
            takes_input = any(each.via == "exchange" for each in self.plan.workload)
            return run_worker, process, self._config_of(name), self.plan.engine, takes_input
        if name in self.frontends:
            return run_frontend, process, config
        profile = self._profiles[name]
        rng = self.world.choices.stream(f"load/{name}")
        if profile.via == "http":
            return ask_over_http, process, profile, rng, self.records
        return ask_as_member, process, profile, rng, self.records, config

    def _config_of(self, name: str) -> Config:
        """That of a host with an engine: its part in the work is its name's."""
        config = self.plan.config
        if not self.prefills:
            return config
        role = "prefill" if name in self.prefills else "decode"
        worker = msgspec.structs.replace(config.worker, role=role)
        return msgspec.structs.replace(config, worker=worker)

    def is_up(self, name: str) -> bool:
        """Whether the host's process runs and may take a step."""
        return self.world.host(name).state is HostState.UP

    def clients_of(self, frontends: Collection[str]) -> list[str]:
        """The clients that ask one of these frontends, or workers themselves."""
        return [
            name
            for name, profile in self._profiles.items()
            if profile.via != "http" or profile.to in frontends
        ]

    def open_requests(self, clients: Collection[str]) -> list[ClientRecord]:
        """Requests of those of these clients that live which have no end yet."""
        return [
            r
            for r in self.records
            if not r.terminals and r.client in clients and self.is_up(r.client)
        ]

    def are_done(self, clients: Collection[str]) -> bool:
        """Whether each of these clients that lives has asked all it had to, and knows every end."""
        return not self.open_requests(clients) and all(map(self._is_done, clients))

    def _is_done(self, name: str) -> bool:
        asked = [r for r in self.records if r.client == name]
        return not self.is_up(name) or len(asked) == self._profiles[name].requests
