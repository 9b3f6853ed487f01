"""`trinamo worker` and `trinamo frontend`: one process of a cluster, until a signal ends it.

What they run is in `roles.py`. Under `trinamo up` they announce on a pipe that they serve; alone
they say it on standard output.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trinamo.runtime.logs.text import leaves, tell_causes

from ..children.readiness import announce, bind_to_parent
from ..options import (
    ApiKeysFile,
    EngineArgs,
    EngineName,
    ModelName,
    ModelPath,
    RoleName,
    Sources,
    takes_sources,
)

if TYPE_CHECKING:
    from trinamo.runtime.config.config import Config


ReadyFd = Annotated[int | None, typer.Option("--ready-fd", hidden=True)]
Parent = Annotated[int | None, typer.Option("--parent", hidden=True)]
UpstreamKeyEnv = Annotated[
    str | None,
    typer.Option(
        "--upstream-key-env",
        metavar="NAME",
        help="The environment variable that holds the upstream's key.",
    ),
]


@takes_sources("etcd", "nats", "show")
def worker(
    *,
    engine: EngineName = None,
    engine_arg: EngineArgs = None,
    role: Annotated[
        RoleName | None,
        typer.Option(
            "--role",
            help="aggregated: do all; decode: answer, and have long prompts computed by workers"
            " whose role is prefill.",
        ),
    ] = None,
    model_name: ModelName = None,
    model_path: ModelPath = None,
    upstream: Annotated[
        str | None,
        typer.Option(
            "--upstream",
            metavar="URL",
            help="With --engine openai: the server to stand before, such as http://host:8000/v1.",
        ),
    ] = None,
    upstream_key_env: UpstreamKeyEnv = None,
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="NAME", help="Another name for the model. Repeatable."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME=ENGINE",
            help="Serve several models: one each time; `;alias=…` and `;path=…` may follow.",
        ),
    ] = None,
    status_port: Annotated[
        int | None, typer.Option("--port", help="Status port; 0: the system chooses.")
    ] = None,
    status_host: Annotated[
        str | None, typer.Option("--host", help="Address of the status port.")
    ] = None,
    check_engine: Annotated[
        bool,
        typer.Option("--check-engine", help="Import the engine, say what is wrong, and exit."),
    ] = False,
    ready_fd: ReadyFd = None,
    parent: Parent = None,
    sources: Sources,
) -> None:
    """Serve a model: register in the control plane and answer what the frontends send."""
    if parent is not None:
        bind_to_parent(parent)
    sources = sources.with_engine(engine, engine_arg).with_options(
        worker__role=role,
        worker__model_name=model_name,
        worker__model_path=model_path,
        worker__upstream__url=upstream,
        worker__upstream__key_env=upstream_key_env,
        worker__model_aliases=alias,
        worker__models=model,
        worker__status_port=status_port,
        worker__status_host=status_host,
    )
    if check_engine:
        from .engine import check_engines

        sys.stdout.write(f"{check_engines(sources.load().worker)}\n")
        return

    async def run(chosen: Config, _: Sources, tell: Callable[[dict[str, Any]], None]) -> None:
        from trinamo.runtime.errors import ConfigError

        from .roles import run_worker

        engines = [each.engine for each in chosen.worker.by_model()]
        if upstream is not None and "openai" not in engines:
            raise ConfigError(
                f"--upstream is asked by --engine openai, and the engine is {', '.join(engines)}"
            )

        def ready(facts: Any) -> None:
            tell(
                {
                    "instance_id": facts.instance_id,
                    "model": facts.model,
                    "engine": facts.engine,
                    "status_url": facts.status_url,
                    "address": ", ".join(facts.addresses.values()),
                }
            )

        await run_worker(chosen, ready=ready, is_supervised=parent is not None)

    _serve("worker", sources, run, ready_fd)


@takes_sources("etcd", "nats", "show")
def frontend(
    *,
    port: Annotated[
        int | None, typer.Option("--port", help="HTTP port; 0: the system chooses.")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to bind.")] = None,
    processes: Annotated[
        int,
        typer.Option(
            "--processes", min=1, max=64, help="How many frontends share the port, a core each."
        ),
    ] = 1,
    name: Annotated[str, typer.Option("--name", hidden=True)] = "",
    upstream: Annotated[
        list[str] | None,
        typer.Option(
            "--upstream",
            metavar="URL",
            help="Ask this OpenAI-compatible server, without workers, etcd or NATS. Repeatable.",
        ),
    ] = None,
    upstream_key_env: UpstreamKeyEnv = None,
    tls_cert: Annotated[
        str | None, typer.Option("--tls-cert", help="Serve HTTPS with this certificate (PEM).")
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option("--tls-key", help="The key of --tls-cert (PEM).")
    ] = None,
    api_keys_file: ApiKeysFile = None,
    ready_fd: ReadyFd = None,
    parent: Parent = None,
    sources: Sources,
) -> None:
    """Serve the OpenAI HTTP API for whatever models the workers register."""
    if parent is not None:
        bind_to_parent(parent)
    sources = sources.with_options(
        http__port=port,
        http__host=host,
        http__upstreams=upstream,
        worker__upstream__key_env=upstream_key_env,
        http__tls__certificate_file=tls_cert,
        http__tls__key_file=tls_key,
        http__api_keys_file=api_keys_file,
    )

    async def run(chosen: Config, found: Sources, tell: Callable[[dict[str, Any]], None]) -> None:
        if processes > 1:
            from .processes import run_processes

            await run_processes(chosen, found, processes, tell)
            return
        from trinamo.transports.assembly.run_file import ProcessEntry

        from ..running.frontends_file import FrontendsFile
        from .roles import run_frontend

        def ready(facts: Any) -> None:
            # Whose certificate who looks may not know, is asked at its status port alone.
            if ready_fd is None and (facts.status_url or facts.url.startswith("http:")):
                entry = ProcessEntry("frontend", os.getpid(), facts.status_url)
                file.publish(facts.url, chosen, [entry])
            tell(
                {
                    "url": facts.url,
                    "status_url": facts.status_url,
                    "dashboard_url": facts.dashboard_url,
                    "workers call": facts.home_address,
                }
            )

        with FrontendsFile.kept() as file:
            is_supervised = parent is not None
            await run_frontend(chosen, ready=ready, name=name, is_supervised=is_supervised)

    _serve("frontend", sources, run, ready_fd)


worker.__dict__["epilog"] = (
    "Examples:  trinamo worker --engine exact --etcd 10.0.0.5:2379 --nats nats://10.0.0.5:4222"
    "  ·  trinamo worker --config cluster.yaml --model-path model.gguf"
    "  ·  trinamo worker --engine exact --role prefill"
    "  ·  trinamo worker --engine mymodule:engine --engine-arg path=weights.bin"
    "  ·  trinamo worker --engine openai --upstream http://10.0.0.7:8000/v1"
)
frontend.__dict__["epilog"] = (
    "Examples:  trinamo frontend --port 8080 --host 0.0.0.0 --etcd 10.0.0.5:2379"
    "  ·  trinamo frontend --config cluster.yaml --processes 4"
    "  ·  trinamo frontend --upstream http://10.0.0.7:8000/v1 --upstream http://10.0.0.8:8000/v1"
)

_Run = Callable[["Config", Sources, Callable[[dict[str, Any]], None]], Awaitable[None]]


def _serve(role: str, sources: Sources, run: _Run, ready_fd: int | None) -> None:
    """Configure the process, run its role to the end, and tell the supervisor of both."""
    from trinamo.runtime.engines.threads import limit_threads

    from ..running.locating import join

    try:
        is_one_hop = role == "frontend" and bool(sources.load().http.upstreams)
        if ready_fd is None and not is_one_hop:
            # Under `up` all is settled; whoever is started alone may be meant to belong to one.
            sources, joined = join(sources)
            if joined:
                sys.stderr.write(f"trinamo: {role} {joined}\n")
        config = sources.load()
        check_files(config, serves_http=role == "frontend")
        if sources.printed():
            return
        # OpenBLAS reads its limit when numpy is imported, so nothing heavy comes before this.
        threads = config.worker.threads
        limit_threads(threads if isinstance(threads, int) else 1)
        _run_role(role, config, functools.partial(run, config, sources), ready_fd)
    except BaseException as error:
        first = next(leaves(error), error)
        if not isinstance(first, SystemExit):
            expected = getattr(first, "code", None)
            # A bug's text means nothing without its type.
            message = str(first) if expected and str(first) else tell_causes(error)
            announce(ready_fd, "error", {"code": expected or "internal", "message": message})
        raise


def check_files(config: Config, *, serves_http: bool) -> None:
    """Read what files the processes will, so that a name that is wrong is told before anything starts."""
    from trinamo.runtime.config import config as planes
    from trinamo.runtime.config.config import read_secrets
    from trinamo.runtime.env import RealEnv
    from trinamo.runtime.http import service
    from trinamo.transports.assembly.http import Http
    from trinamo.transports.assembly.planes import open_fleet

    open_fleet(config.security, RealEnv(), read_secrets(config.security))
    planes.check_files(config)
    if serves_http:
        service.check_files(config.http, RealEnv(), Http())


def _run_role(
    role: str,
    config: Config,
    run: Callable[[Callable[[dict[str, Any]], None]], Awaitable[None]],
    ready_fd: int | None,
) -> None:
    import trio

    from trinamo.runtime.logs.formats import JsonFormat
    from trinamo.runtime.logs.setup import setup_log

    from .output import tell_losses, unblock_output
    from .resources import raise_descriptor_limit

    raise_descriptor_limit()
    unblock_output()
    handler = setup_log(config.log)
    tell_losses(handler)

    def tell(facts: dict[str, Any]) -> None:
        announce(ready_fd, "ready", facts)
        if ready_fd is None:
            told = ", ".join(f"{key} {value}" for key, value in facts.items() if value)
            text = f"{role} is ready: {told}"
            # Whoever reads the log by a program reads this line among the others.
            is_plain = sys.stdout.isatty() or not isinstance(handler.formatter, JsonFormat)
            said = logging.makeLogRecord({"name": "trinamo", "levelname": "INFO", "msg": text})
            sys.stdout.write(f"{text if is_plain else handler.format(said)}\n")
            sys.stdout.flush()

    trio.run(run, tell)
