"""What `trinamo up` is going to start, decided before anything is started.

Only decides; `cluster.py` does it. Engines of the user's own are imported by a process of its own
first: what an import takes (memory, threads, a GPU) is no business of `up`.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

import attrs

from trinamo.runtime.config.config import Config
from trinamo.runtime.config.models import is_own_engine
from trinamo.runtime.config.worker import WorkerConfig
from trinamo.runtime.engines.threads import count_cores
from trinamo.runtime.errors import ConfigError
from trinamo.transports.assembly.run_file import names_etcd, names_nats
from trinamo.transports.servers.binaries import LOOPBACK

from ..options import Sources
from ..serve.engine import choose_engine, share_cores

CORES_OF_A_WORKER: Final = 4
"""A step of a small model gains little from more; the memory bandwidth is one for all."""
WORKERS: Final = 2
"""Of engines that compute next to nothing: enough to see one go and the other answer."""
LLAMACPP: Final = "llamacpp"
CHECK_TIMEOUT_S: Final = 120.0


@attrs.frozen
class StartPlan:
    """What is to be started."""

    config: Config
    sources: Sources
    workers: int
    frontends: int
    prefills: int
    """So many of the workers compute prompts for the others; 0: each does all."""
    engines: tuple[str, ...]
    """Of the models of each worker."""
    engine_reason: str
    threads: int
    """Of one step of a worker."""
    has_etcd: bool
    """Whether an etcd of our own is started."""
    has_nats: bool
    """Whether a NATS server of our own is started."""

    @property
    def engine(self) -> str:
        """The engines as words."""
        return ", ".join(self.engines)

    def worker_roles(self) -> list[tuple[str, str]]:
        """What each worker is called, and its role."""
        counts = {"worker": self.workers}
        if self.prefills:
            counts = {"prefill": self.prefills, "decode": self.workers - self.prefills}
        return [
            (f"{role}-{number}", "aggregated" if role == "worker" else role)
            for role, count in counts.items()
            for number in range(1, count + 1)
        ]

    @property
    def ports(self) -> list[tuple[str, int, str]]:
        """What listens where: host, port, and how to choose another; without those left to chance."""
        http, etcd, nats = (
            self.config.http,
            self.config.control_plane.etcd,
            self.config.event_plane.nats,
        )
        all_of_them = [
            (http.host, http.port, "--port, or 0 to let the system choose"),
            (LOOPBACK, etcd.port, "--etcd-port, or leave it out"),
            (LOOPBACK, nats.port, "--nats-port, or leave it out"),
        ]
        return [each for each in all_of_them if each[1]]

    @property
    def worker_command(self) -> str:
        """What starts one more worker like these, beside this cluster, by hand."""
        worker = self.config.worker
        words = ["trinamo", "worker"]
        if self.config.control_plane.etcd.port:
            words += ["--etcd", f"{LOOPBACK}:{self.config.control_plane.etcd.port}"]
        if worker.models:
            words += [word for line in worker.models for word in ("--model", line)]
        else:
            words += ["--engine", self.engine]
        for name, value in worker.engine_args.items():
            words += ["--engine-arg", f"{name}={value}"]
        for option, text in (("name", worker.model_name), ("path", worker.model_path)):
            words += [f"--model-{option}", text] if text else []
        return shlex.join(words)

    def joined(self, *, etcd: str, nats: str, nats_token: str, secret_file: str) -> Sources:
        """The sources of whoever belongs to the cluster; what is empty is as configured."""
        overrides: dict[str, Any] = {
            "control_plane__embedded": False,
            "event_plane__embedded": False,
        }
        if LLAMACPP in self.engines and self.workers > 1:
            # A prompt is computed sooner where its beginning was, if nobody says otherwise.
            overrides["router__policy"] = self.sources.load(router__policy="kv").router.policy
        given = {
            "control_plane__etcd__endpoints": etcd,
            "event_plane__nats__servers": nats,
            "event_plane__nats__token": nats_token,
            "security__secret_file": secret_file,
        }
        overrides |= {key: text for key, text in given.items() if text}
        return self.sources.with_overrides(**overrides)

    def child_environ(self, joined: Sources) -> dict[str, str]:
        """The environment of a child of the cluster that `joined` describes."""
        overrides: dict[str, Any] = {}
        if not self.config.worker.models:
            overrides["worker__engine"] = self.engine
        if LLAMACPP in self.engines:
            overrides["worker__threads"] = self.threads
        if self.config.log.format == "auto":
            # Lines for people: a child writes to a pipe and would choose JSON.
            overrides["log__format"] = "console"
        if self.workers > 1:
            # Several workers cannot share one port; and the table wants to ask each of them.
            overrides["worker__status_port"] = 0
        http = self.config.http
        if (http.needs_key or http.scheme == "https") and http.status_port is None:
            # Who asks on this machine has no key, and need not trust the certificate of another name.
            overrides["http__status_port"] = 0
        # Python's output must not wait in a buffer for the next line.
        return {**joined.with_overrides(**overrides).environ(), "PYTHONUNBUFFERED": "1"}


def plan_cluster(
    sources: Sources, *, workers: int | None = None, frontends: int = 1, prefills: int = 0
) -> StartPlan:
    """Decide what to start; raises `ConfigError` for what one machine cannot be.

    Of the `workers`, `prefills` compute prompts for the others. Without a number it is for the
    engine to say: of `llamacpp` one for each `CORES_OF_A_WORKER`, else `WORKERS`.
    """
    config = sources.load()
    control, events = config.control_plane, config.event_plane
    if control.backend == "memory":
        raise ConfigError(
            "control_plane.backend is memory, which processes cannot share; set it to etcd"
        )
    if events.backend == "memory" and config.data_plane.requests == "nats":
        raise ConfigError("data_plane.requests is nats, but event_plane.backend is memory")
    choices = [choose_engine(each) for each in config.worker.by_model()]
    engines = tuple(choice.engine for choice in choices)
    reasons = list(dict.fromkeys(choice.why for choice in choices))
    if workers is None:
        workers = (
            max(1, count_cores().usable // CORES_OF_A_WORKER) if LLAMACPP in engines else WORKERS
        )
    threads, why = share_cores(config.worker.threads, engines, workers=workers)
    if LLAMACPP in engines:
        reasons.append(f"workers {workers}, each of {why}")
    if workers > 1 and config.data_plane.tcp.port:
        raise ConfigError(
            f"data_plane.tcp.port is {config.data_plane.tcp.port}, which {workers} workers on one"
            " machine cannot share; leave it 0"
        )
    if prefills and any(choice.engine == "echo" for choice in choices):
        raise ConfigError(
            "--disagg moves KV blocks, and the engine echo has none; choose --engine exact, mocker"
            " or llamacpp"
        )
    plan = StartPlan(
        config=config,
        sources=sources.read(),
        workers=workers,
        frontends=frontends,
        prefills=prefills,
        engines=engines,
        engine_reason="; ".join(reasons),
        threads=threads,
        has_etcd=control.backend == "etcd"
        and _is_ours(
            control.embedded,
            control.etcd.nodes,
            is_named=names_etcd(control.etcd),
        ),
        has_nats=events.backend == "nats"
        and _is_ours(
            events.embedded,
            events.nats.nodes,
            is_named=names_nats(events.nats),
        ),
    )
    _check_ports(plan)
    return plan


def _check_ports(plan: StartPlan) -> None:
    control, events = plan.config.control_plane, plan.config.event_plane
    for key, port, is_ours in (
        ("control_plane.etcd.port", control.etcd.port, plan.has_etcd),
        ("event_plane.nats.port", events.nats.port, plan.has_nats),
    ):
        if port and not is_ours:
            raise ConfigError(
                f"{key} is {port}, but no server of ours is started: the configuration names one"
                " of somebody's own, or says so; leave the port out"
            )
    taken = [port for _, port, _ in plan.ports]
    twice = next((port for port in taken if taken.count(port) > 1), 0)
    if twice:
        raise ConfigError(f"port {twice} is to be that of two servers; give each one of its own")


def _is_ours(embedded: bool | None, nodes: int, *, is_named: bool) -> bool:
    """Whether to start a server: as configured, else unless the configuration names others."""
    return embedded if embedded is not None else nodes == 1 and not is_named


def check_own_engines(section: WorkerConfig, environ: Mapping[str, str]) -> None:
    """Return if all of them import and are engines; blocks meanwhile.

    A worker started with `environ` has the configuration `section`. Raises `ConfigError` for a
    check that could not end, and `SystemExit` for an engine that is none: what the check said of it
    has then been written to standard error.
    """
    own = [each.engine for each in section.by_model() if is_own_engine(each.engine)]
    if not own:
        return
    command = [sys.executable, "-m", "trinamo.cli", "worker", "--check-engine"]
    command += ["--parent", str(os.getpid())]
    what = f"engine {', '.join(own)}"
    try:
        done = subprocess.run(  # noqa: S603 -- the command is ours
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=CHECK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{what} is not imported within {CHECK_TIMEOUT_S:g} s") from None
    if done.returncode:
        sys.stderr.write(done.stderr.decode("utf-8", "replace"))
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise ConfigError(f"{what} does not import: the process that did was killed by {name}")
    if done.returncode:
        raise SystemExit(done.returncode)
