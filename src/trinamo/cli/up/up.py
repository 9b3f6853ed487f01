"""`trinamo up`: etcd, NATS, workers and a frontend on this machine, in one command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..options import (
    ApiKeysFile,
    EngineArgs,
    EngineName,
    ModelName,
    ModelPath,
    Sources,
    takes_sources,
)


@takes_sources("etcd", "nats", "show")
def up(
    *,
    engine: EngineName = None,
    engine_arg: EngineArgs = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            max=64,
            help="How many worker processes [2; of llamacpp one for 4 cores].",
        ),
    ] = None,
    disagg: Annotated[
        bool,
        typer.Option(
            "--disagg", help="Workers of two roles: some compute long prompts for the others."
        ),
    ] = False,
    prefill: Annotated[
        int | None,
        typer.Option("--prefill", min=1, max=64, help="With --disagg: prefill workers [1]."),
    ] = None,
    decode: Annotated[
        int | None,
        typer.Option("--decode", min=1, max=64, help="With --disagg: decode workers [1]."),
    ] = None,
    frontend_processes: Annotated[
        int,
        typer.Option(
            "--frontend-processes", min=1, max=64, help="How many frontends share the HTTP port."
        ),
    ] = 1,
    port: Annotated[
        int | None, typer.Option("--port", help="HTTP port [8787]; 0: the system chooses.")
    ] = None,
    etcd_port: Annotated[
        int | None,
        typer.Option(
            "--etcd-port",
            min=1,
            max=65_535,
            help="etcd listens on 127.0.0.1 there, for every user of this machine \\[a socket for you].",
        ),
    ] = None,
    nats_port: Annotated[
        int | None,
        typer.Option(
            "--nats-port",
            min=1,
            max=65_535,
            help="NATS listens on 127.0.0.1 there and wants its token \\[a free port].",
        ),
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to bind [127.0.0.1].")] = None,
    model_name: ModelName = None,
    model_path: ModelPath = None,
    api_keys_file: ApiKeysFile = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Lines instead of a live table, also on a terminal.")
    ] = False,
    sources: Sources,
) -> None:
    """Start a whole cluster on this machine; Ctrl-C drains it and leaves nothing behind."""
    sources = sources.with_engine(engine, engine_arg).with_options(
        worker__model_name=model_name,
        worker__model_path=model_path,
        http__port=port,
        http__host=host,
        http__api_keys_file=api_keys_file,
        control_plane__etcd__port=etcd_port,
        event_plane__nats__port=nats_port,
    )
    from ..serve.serving import check_files

    check_files(sources.load(), serves_http=True)
    if sources.printed():
        return
    if disagg and workers is not None:
        raise typer.BadParameter("with --disagg say how many by --prefill and --decode")
    if not disagg and (prefill is not None or decode is not None):
        raise typer.BadParameter("--prefill and --decode need --disagg")
    prefills = (prefill or 1) if disagg else 0

    import trio

    from ..serve.output import unblock_output
    from ..serve.resources import raise_descriptor_limit
    from .cluster import LocalCluster
    from .display import open_display, show_log
    from .plan import check_own_engines, plan_cluster

    plan = plan_cluster(
        sources,
        workers=prefills + (decode or 1) if disagg else workers,
        frontends=frontend_processes,
        prefills=prefills,
    )
    check_own_engines(plan.config.worker, plan.child_environ(plan.sources))
    raise_descriptor_limit()
    unblock_output()
    with open_display(plain=plain) as display, show_log(display, plan.config.log):
        display.say(f"engine {plan.engine}: {plan.engine_reason}")
        code = trio.run(LocalCluster(plan, display).run)
        display.busy("")
        if code == 0:
            display.say("The cluster has ended; nothing is left behind.")
    sys.exit(code)


up.__dict__["epilog"] = (
    "Examples:  trinamo up  ·  trinamo up --engine exact --workers 4 --port 8080  ·  "
    "trinamo up --config cluster.yaml --set http.drain_timeout_s=5  ·  "
    "trinamo up --engine exact --disagg --prefill 1 --decode 2  ·  "
    "trinamo up --engine ./mine.py:engine --workers 1  ·  "
    "trinamo up --etcd-port 2379 --nats-port 4222"
)
